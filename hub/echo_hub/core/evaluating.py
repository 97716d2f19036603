"""Evaluations by nodes: completions of all held-out problems, sampled with one version. Their groups differ from
training groups in three ways:

- Their leases name the evaluated version, even if newer ones exist. The groups are not in the learner's queues: they do
  not count when groups are admitted, no step trains on them, and they cannot become stale.
- An ended episode is finished at once: its rollouts become `evaluated` and have no further effect. After a scorer
  failure the episode has no reward, because sampling again would give the same tokens.
- The store has no row for such a group. Its evaluated rollouts show its progress, so an evaluation resumes where it was
  after a restart.

Groups whose episodes are sessions are leased as far as slots are free (`core/policy/session_slots.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from echo_hub.core.accounting.effects import EvaluationDone
from echo_hub.core.accounting.groups import LeasedRollout, RolloutGroup, Slot, SortedIds
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot, UnfinishedRollout
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.nodes.node import Node
from echo_hub.core.policy.session_slots import SessionSlots
from echo_hub.core.settings import CoordinatorSettings
from echo_shared.sampling.draws import derive_seed
from echo_shared.wire.messages import DropReason


def evaluation_seed(run_seed: int, number: int) -> int:
    """Return the sampling seed of held-out problem `number`. All versions are sampled with the same seeds, so each pair
    of versions can be compared problem by problem.
    """
    return derive_seed(run_seed, "evaluation", number)


class Evaluating:
    """Owner of the groups of evaluations: opens the groups, names the version in their leases, and ends the groups.

    `_left`: unfinished groups of each version under evaluation. `_over`: ended episodes by version, for evaluations
    whose result is not in the store.
    """

    for_learner = False
    keeps_payloads = False
    lengths = None
    may_move_on = False
    """Nodes may not switch to a newer version within a completion: an evaluation measures a single version."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        snapshot: CoordinatorSnapshot,
        *,
        ledger: Ledger,
        slots: SessionSlots,
        out: Outbox,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._slots = slots
        self._out = out
        self.wanting = SortedIds()
        self._unasked = SortedIds()
        """Groups of evaluations in progress that wait for free slots of sessions."""
        self._left: dict[int, set[int]] = {}
        self._over: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        for group_id, index in snapshot.evaluated:
            if (about := EvaluationGroup.of(group_id)) is not None:
                self._over[about.policy_version].add((group_id, index))

    def restore(self, rows: Iterable[UnfinishedRollout]) -> None:
        """Open the evaluation groups of these unfinished rollouts. The caller then restores the rollouts."""
        sizes: dict[int, int] = {}
        for row in rows:
            sizes[row.group_id] = max(sizes.get(row.group_id, 0), row.index + 1)
        for group_id, size in sorted(sizes.items()):
            if (about := EvaluationGroup.of(group_id)) is not None:
                self._open(about, at_least=size)

    def drop_what_settings_lack(self) -> None:
        """Drop restored groups of problems or samples that the current settings no longer have."""
        for about, group in list(self._groups()):
            if about.number >= self._settings.evaluation_problems or len(group.slots) > self._size(about):
                self._ledger.drop_group(group, DropReason.REVOKED)

    def begin(self, policy_version: int) -> None:
        """Start the evaluation of this version: open its unfinished groups. EvaluationDone follows, perhaps at once."""
        if policy_version in self._left:
            return
        for greedy in (True, False):
            for number in range(self._settings.evaluation_problems):
                self._open(EvaluationGroup(policy_version=policy_version, greedy=greedy, number=number))
        self._left[policy_version] = self._groups_of(policy_version)
        for group_id in sorted(self._left[policy_version]):
            if self._ledger.groups[group_id].session is None:
                self._ledger.ask_for(self._ledger.groups[group_id])
            else:
                self._unasked.add(group_id)
        self.ask_for_sessions()
        self._end_if_done(policy_version)

    def ask_for_sessions(self) -> None:
        """Ask for leases of groups whose episodes are sessions: of as many groups as the free slots for open sessions
        allow.
        """
        while self._unasked:
            group = self._ledger.groups[self._unasked[0]]
            if not self._slots.fits(self, len(group.slots) - group.num_ended):
                return
            self._unasked.discard(group.group_id)
            self._ledger.ask_for(group)

    def abandon(self, policy_version: int) -> None:
        self._drop(policy_version)
        self._left.pop(policy_version, None)
        self._over.pop(policy_version, None)

    def lease_version(self, group: RolloutGroup, node: Node) -> int:
        """Return the evaluated version. A node that lacks it fetches it."""
        return _about(group).policy_version

    def preferred(self, group: RolloutGroup) -> tuple[str, ...]:
        """Return no nodes: all nodes take part in an evaluation."""
        return ()

    def end_episode(self, rollout: LeasedRollout, reward: float) -> None:
        self._end_episode(rollout, reward)

    def scorer_failed(self, rollout: LeasedRollout, detail: str) -> None:
        self._end_episode(rollout, None)

    def returned_too_often(self, group: RolloutGroup) -> None:
        """Do nothing: an evaluation problem cannot be replaced, so the index is leased again."""

    def end_run(self) -> None:
        """Drop the evaluation groups that were restored after the hub's restart and whose evaluation was not requested
        again.
        """
        open_versions = {about.policy_version for about, _ in self._groups()}
        for version in open_versions - self._left.keys():
            self._drop(version)

    def _end_episode(self, rollout: LeasedRollout, reward: float | None) -> None:
        version = rollout.policy_version
        self._ledger.evaluate(rollout, reward)
        self._over[version].add((rollout.group_id, rollout.index))
        self.ask_for_sessions()
        if version in self._left and rollout.group_id not in self._ledger.groups:
            self._left[version].discard(rollout.group_id)
            self._end_if_done(version)

    def _end_if_done(self, policy_version: int) -> None:
        if not self._left[policy_version]:
            del self._left[policy_version]
            self._over.pop(policy_version, None)
            self._out.act(EvaluationDone(policy_version=policy_version))

    def _open(self, about: EvaluationGroup, at_least: int = 0) -> None:
        size, over = max(self._size(about), at_least), self._over[about.policy_version]
        ended = {index for index in range(size) if (about.group_id, index) in over}
        if about.group_id not in self._ledger.groups and len(ended) < size:
            seed = evaluation_seed(self._settings.run_seed, about.number)
            slots = [Slot(is_over=index in ended) for index in range(size)]
            self._ledger.open_group(
                RolloutGroup(
                    about.group_id,
                    seed,
                    slots,
                    self,
                    num_ended=len(ended),
                    asked_for=False,
                    session=self._settings.session_of(about.group_id),
                )
            )

    def _size(self, about: EvaluationGroup) -> int:
        return 1 if about.greedy else self._settings.evaluation_samples_of(about.number)

    def _drop(self, policy_version: int) -> None:
        for group_id in sorted(self._groups_of(policy_version)):
            self._unasked.discard(group_id)
            self._ledger.drop_group(self._ledger.groups[group_id], DropReason.RUN_ENDED)

    def _groups_of(self, policy_version: int) -> set[int]:
        return {about.group_id for about, _ in self._groups() if about.policy_version == policy_version}

    def _groups(self) -> Iterator[tuple[EvaluationGroup, RolloutGroup]]:
        return ((_about(group), group) for group in self._ledger.groups.values() if group.owner is self)


def _about(group: RolloutGroup) -> EvaluationGroup:
    about = EvaluationGroup.of(group.group_id)
    assert about is not None
    return about
