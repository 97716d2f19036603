"""The learner's side of the run: the next step, its batch, and the published versions.

    learner_version   newest version whose checkpoint the learner has written; None while the learner is away
    trained_steps     steps recorded as trained; a learner with an older version first repeats them from the store
    planned           batches, written to the database, of the steps after trained_steps; at most two
    training          step that the learner is computing

While the learner trains step k, it gets the batch of step k + 1 as soon as the oldest waiting groups are complete and
fill it. So the learner need not pause. When the learner is idle, a batch may skip groups that are still open. Whenever
its batch is planned, step k + 1 trains version k, so the staleness bound is checked against k. In co-located and
sequential mode no group is complete for step k + 1 before version k is published.

The database has a step's batch before any result of the step is visible. The learner may begin earlier, but keeps no
result before the commit. Each step counts once. If a restarted learner's checkpoint contains planned steps, these are
trained and the learner brings their metrics. Otherwise it gets the same batches again.

Selection of groups for a step:
- `groups_per_step` complete groups, oldest first;
- with `tokens_per_step`, fewer: only until their sampled tokens reach this number (C3PO of Ring-lite, arXiv
  2506.14731);
- with a `curriculum`, problems known to teach nothing are not sampled at all (`core/policy/curriculum.py`);
- with `dynamic_sampling`, groups with unequal rewards (DAPO, arXiv 2503.14476, section 3.2). The other groups are
  *flat*: they are dropped and replaced. After `MAX_FLAT_BATCHES` times `groups_per_step` flat groups for one step, flat
  groups are trained too. Otherwise a task whose problems are all solved, or all unsolved, would stop the run.

In co-located and sequential mode the selection depends on the groups alone, not on the order of completion: groups are
examined in order of id. A step is planned once its expected number of groups is complete, including replacements of
dropped groups. The remaining groups are dropped as stale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from math import ceil
from statistics import fmean
from typing import Final

from echo_hub.core.accounting.effects import (
    AnnounceVersion,
    BeginStep,
    GroupsRated,
    PlannedGroup,
    PublishVersion,
    TrainStep,
    VersionRecorded,
)
from echo_hub.core.accounting.events import GroupPrepared, LearnerReady, StepDone
from echo_hub.core.accounting.groups import LeasedRollout, RolloutGroup, Slot, SortedIds
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.accounting.snapshot import RECENT_STEPS, CoordinatorSnapshot, GroupRow, StepRow
from echo_hub.core.nodes.node import Node
from echo_hub.core.policy.curriculum import Curriculum, CurriculumStatus
from echo_hub.core.policy.measured import Tempo
from echo_hub.core.policy.mixture import TaskTally
from echo_hub.core.policy.sizing import Outlook, oldest_useful_version
from echo_hub.core.policy.usability import Usability
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.core.trust.screening import Seen, StepScreen
from echo_shared.errors import LearnerError, LocalProtocolError
from echo_shared.wire.messages import DropReason

MAX_SCORER_FAILURES: Final = 3
"""Number of scorer failures on one turn of an index until its group is dropped, so that a broken problem cannot stall
the run. Each failure is on another sample."""

STEPS_AHEAD: Final = 2
"""Maximum number of steps given to the learner before the first of them is reported done."""

MAX_REDRAWS: Final = 8
"""Number of times that a group's stale rollouts are sampled again. The next time the group is dropped: no present node
is fast enough for it."""

KEPT_VERSIONS: Final = 8
"""Number of newest published versions that nodes can fetch. Older versions are withdrawn from distribution."""

MAX_FLAT_BATCHES: Final = 4
"""Groups with equal rewards that may be dropped for one step, as a multiple of `groups_per_step`."""


class Training:
    """Owner of the learner's groups: opens them, and plans batches from the oldest complete ones. Planning a batch
    drops rollouts that are too stale for it."""

    for_learner = True
    keeps_payloads = True
    lengths = None

    def __init__(
        self, settings: CoordinatorSettings, snapshot: CoordinatorSnapshot, *, ledger: Ledger, out: Outbox
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._out = out
        self.wanting = SortedIds()
        self._tally = TaskTally(settings.mixture, settings.tasks, discount=settings.discount)
        self._curriculum = _curriculum(settings, snapshot)
        self._replayable = set(snapshot.replayable)
        self._newest_planned_group = snapshot.newest_planned_group
        self._flat_groups = list(snapshot.flat_groups)
        self._batch_sizes = deque(snapshot.batch_sizes, RECENT_STEPS)
        self.trained_steps = snapshot.trained_steps
        self.planned = deque(snapshot.planned)
        self.published_version = snapshot.published_version
        self._fetchable = deque([snapshot.published_version], KEPT_VERSIONS)
        """Published versions that nodes can certainly fetch. Of the versions published before the hub's start, only the
        newest is included: in a run restored from a backup, the older ones may be missing."""
        self._publishing = 0
        self.usability = Usability()
        self.tempo = Tempo()
        self.learner_version: int | None = None
        self._given = 0
        """Newest step given to the learner since it came up; at least the learner's version."""
        self._computed = 0
        """Newest step computed by the learner since it came up; at least the learner's version."""
        self._computed_at: dict[int, float] = {}
        """Time at which the learner computed each step that no checkpoint contains yet."""
        self._advanced: tuple[int, ...] = ()
        """Counters at the last attempt to plan a step or to give one to the learner. While they are equal, another
        attempt is useless."""
        self.num_changes = 0
        """Counter that grows with every change of the learner's state and every published version."""

    @property
    def next_step(self) -> int:
        """Return the first step whose batch is not planned yet."""
        return self.trained_steps + 1 + len(self.planned)

    @property
    def curriculum(self) -> CurriculumStatus | None:
        return None if self._curriculum is None else self._curriculum.status

    @property
    def training(self) -> int | None:
        """Return the step that the learner is computing; None while it is idle."""
        if self.learner_version is None or self._given == self._computed:
            return None
        return self._computed + 1

    @property
    def idle_version(self) -> int | None:
        """Return the learner's version if the learner is idle and has trained all planned steps; otherwise None."""
        idle = self.training is None and not self.planned and self.learner_version == self.trained_steps
        return self.learner_version if idle else None

    @property
    def newest_to_lease(self) -> int | None:
        """Return the newest version that a lease may name; None while leasing is impossible."""
        match self._settings.mode:
            case "colocated":
                return self.idle_version
            case "sequential":
                return None if self.usability.is_withdrawn(self.published_version) else self.published_version
            case "async":
                return max(self._usable, default=None)

    @property
    def _usable(self) -> list[int]:
        return [version for version in self._fetchable if not self.usability.is_withdrawn(version)]

    @property
    def may_move_on(self) -> bool:
        """True if nodes may switch to the newest published version within a completion, because the run allows it and
        engines can use that version."""
        return self._settings.interrupts and not self.usability.is_withdrawn(self.published_version)

    @property
    def finished(self) -> bool:
        """True if the last step is trained and the last version due is published."""
        steps_done = not self.planned and self.trained_steps >= self._settings.steps
        return steps_done and self.published_version >= self._settings.newest_due_version(self.trained_steps)

    @property
    def outlook(self) -> Outlook:
        """Return the expected number of groups in the next batch and in later ones. If batch sizes vary
        (`tokens_per_step`), use the average of recent ones. Before the first step of such a run, expect a next batch of
        `groups_per_step` groups, and 0 for later batches (unknown)."""
        usual = self._settings.groups_per_step
        if self._settings.tokens_per_step:
            usual = ceil(fmean(self._batch_sizes)) if self._batch_sizes else 0
        return Outlook(next_step=self.next_step, next_batch=self._next_batch(usual), later_batches=usual)

    def _next_batch(self, usual: int) -> int:
        """Return the expected number of groups in the next batch. With a token budget, extrapolate from the tokens of
        complete groups. `usual`: average number of groups in recent batches; 0 = unknown."""
        expected, budget = usual or self._settings.groups_per_step, self._settings.tokens_per_step
        while expected < self._settings.groups_per_step:
            if not self._first_are_complete(expected):
                return expected
            tokens = sum(self._ledger.groups[group_id].num_tokens for group_id in self._ledger.complete.first(expected))
            if tokens >= budget:
                return expected
            expected += ceil((budget - tokens) * expected / tokens)
        return self._settings.groups_per_step

    def _first_are_complete(self, count: int) -> bool:
        """Return True if the oldest `count` waiting groups are all complete."""
        waiting, complete = self._ledger.waiting, self._ledger.complete
        return min(len(waiting), len(complete)) >= count and waiting[count - 1] == complete[count - 1]

    def change(self, settings: CoordinatorSettings, now: float) -> None:
        """Apply new settings. Planned batches stay; groups too stale for a lowered bound are dropped at once."""
        has_fallen = settings.staleness_bound < self._settings.staleness_bound
        self._settings = settings
        self.num_changes += 1
        if has_fallen:
            self.sweep(now)

    def restore(self, rows: Iterable[GroupRow]) -> None:
        """Restore the groups that the store has from before the hub's restart. The caller then restores their
        rollouts.
        """
        for row in rows:
            group = self._group(row.group_id, row.seed)
            group.prompt = row.prompt
            self._ledger.add_group(group)

    def passes_over(self, prepared: GroupPrepared) -> bool:
        return self._curriculum is not None and self._curriculum.passes_over(prepared)

    def open_group(self, prepared: GroupPrepared) -> None:
        group = self._group(prepared.group_id, prepared.seed)
        group.prompt, group.prompt_tokens = prepared.prompt, prepared.prompt_tokens
        group.expected_tokens = self._ledger.lengths.predict(prepared.prompt)
        self._ledger.open_group(group)

    def _group(self, group_id: int, seed: int) -> RolloutGroup:
        slots = [Slot() for _ in range(self._settings.group_size)]
        return RolloutGroup(group_id, seed, slots, self, session=self._settings.session_of(group_id))

    def lease_version(self, group: RolloutGroup, node: Node) -> int:
        newest = self.newest_to_lease
        assert newest is not None
        if self._settings.mode == "async" and node.policy_version is not None:
            if not self.usability.is_withdrawn(own := min(newest, node.policy_version)):
                newest = own
            return newest if self._settings.interrupts else self._going_on(group, newest)
        return newest

    def preferred(self, group: RolloutGroup) -> tuple[str, ...]:
        """Return no nodes: the terms of a step's work choose among nodes."""
        return ()

    def _going_on(self, group: RolloutGroup, newest: int) -> int:
        """Return the version that a lease of this group should name. If the hub has tokens of unfinished rollouts of
        the group, name their version, so that the node can continue them: the newest one that nodes can fetch and that
        is fresh enough. Otherwise return `newest`."""
        begun = {
            before.policy_version
            for index in group.unleased
            if (before := group.slots[index].begun) is not None and before.is_begun
        }
        if not any(version < newest for version in begun):
            return newest
        step = self.outlook.step_of(self._ledger.waiting.position(group.group_id))
        oldest = oldest_useful_version(self._settings, step)
        return max(
            (version for version in begun.intersection(self._usable) if oldest <= version <= newest), default=newest
        )

    def end_episode(self, rollout: LeasedRollout, reward: float) -> None:
        self._ledger.score(rollout, reward)

    def scorer_failed(self, rollout: LeasedRollout, detail: str) -> None:
        """Have the turn sampled again with another seed, or drop the group after `MAX_SCORER_FAILURES` failures."""
        group = self._ledger.groups[rollout.group_id]
        self._ledger.draw_again(rollout, detail)
        if group.slots[rollout.index].scorer_failures >= MAX_SCORER_FAILURES:
            self._ledger.drop_group(group, DropReason.SCORER_FAILED)

    def returned_too_often(self, group: RolloutGroup) -> None:
        """Drop the group, so that another problem replaces it."""
        self._ledger.drop_group(group, DropReason.RETURNED)

    def end_run(self) -> None:
        """Drop the groups that no step has used. Runs with variable batches or a lowered number of steps have such
        groups."""
        for group in [group for group in self._ledger.groups.values() if group.owner is self]:
            self._ledger.drop_group(group, DropReason.RUN_ENDED)

    def learner_ready(self, event: LearnerReady, now: float) -> None:
        """Take over the version of a learner that has started. Raises LocalProtocolError if its checkpoint and the
        store cannot belong to the same run."""
        policy_version = event.policy_version
        missing = [step for step in range(policy_version + 1, self.trained_steps + 1) if step not in self._replayable]
        if missing or policy_version >= self.next_step:
            raise LocalProtocolError(
                "The learner's checkpoint and the hub's store do not fit together.",
                got=f"a checkpoint of version {policy_version}; the store has {self.trained_steps} trained steps and "
                f"{len(self.planned)} planned ones"
                + (f", and the rollouts of step {missing[0]} are no longer kept" if missing else ""),
                do="Restore the run directory, checkpoints and database together, from one backup.",
            )
        for step in range(self.trained_steps + 1, policy_version + 1):
            self._count_step(event.metrics.get(step, {}), event.screens.get(step, StepScreen()), now)
        self.learner_version = self._given = self._computed = policy_version
        self.num_changes += 1
        self._publish_if_due()

    def learner_lost(self) -> None:
        self.learner_version = None
        self.num_changes += 1
        self._computed_at.clear()
        self.tempo.lost()

    def step_computed(self, step: int, now: float) -> None:
        if step != self.training:
            raise LocalProtocolError(
                "The learner computed a step that it was not given.", got=f"step {step}, not {self.training}"
            )
        self._computed = step
        self._computed_at[step] = now
        self.num_changes += 1
        self.tempo.done(step, now)

    def whose(self, event: StepDone) -> tuple[list[Seen], list[str]]:
        """Return the learner's findings about rollouts sampled by a single node, and the nodes that sampled any part of
        a suspect rollout. Both are empty if this step was reported before."""
        screen = event.screen
        if event.step <= self.trained_steps or not (screen.screened or screen.suspects):
            return [], []
        drawn = [self._ledger.rollouts[rollout_id] for rollout_id in self.planned[0].rollout_ids]
        screened = [
            Seen(rollout.node_id, evidence, event.step - 1 - rollout.oldest_version)
            for place, evidence in screen.screened.items()
            if not (rollout := drawn[place]).drawn_by
        ]
        return screened, sorted({node_id for place in screen.suspects for node_id in drawn[place].drawers})

    def step_done(self, event: StepDone, now: float) -> None:
        step = event.step
        if step not in self._computed_at:
            self.step_computed(step, now)
        if step - 1 != self.learner_version:
            raise LocalProtocolError(
                "The learner has written a step, but not the one before it.",
                got=f"step {step} after version {self.learner_version}",
            )
        computed_at = self._computed_at.pop(step)
        if step > self.trained_steps:
            self._count_step(event.metrics, event.screen, computed_at)
        self.learner_version = step
        self.num_changes += 1
        self._publish_if_due()

    def version_published(self, policy_version: int, now: float) -> None:
        """Record a published version. Only the newest version is announced; a late older one is not."""
        self._out.record(VersionRecorded(policy_version=policy_version, published_at=now))
        if policy_version > self.published_version:
            self.published_version = policy_version
            self._fetchable.append(policy_version)
            self.usability.forget_before(self._fetchable[0])
            self.num_changes += 1
            self._out.act(AnnounceVersion(policy_version=policy_version))

    def version_unusable(self, policy_version: int, reason: str) -> None:
        """Continue with older versions if no engine can use this version. Raises LearnerError if the run cannot
        continue: co-located and sequential mode need every version, and every run needs its last one."""
        if self._settings.mode != "async" or policy_version >= self._settings.steps:
            raise LearnerError(
                "The run cannot continue: no engine can use the adapter of its newest version.",
                got=f"version {policy_version}: {reason}",
                do="Restore the run from a backup, or remove the newest directory in checkpoints/ and that of this "
                "version in adapters/; then start the hub, which trains the step again.",
            )
        self.usability.refused_by_hub(policy_version, reason)
        self.num_changes += 1

    def refused(self, policy_version: int, node: Node) -> tuple[str, ...]:
        """Note that the node's engine cannot use the version. If this withdraws the version, return the nodes whose
        return of leases is not a failure."""
        if policy_version not in self._fetchable or not policy_version:
            return ()
        excused = self.usability.refused(policy_version, node)
        self.num_changes += bool(excused)
        return excused

    def drew(self, policy_version: int, node: Node) -> None:
        if policy_version in self._fetchable:
            self.num_changes += self.usability.drew(policy_version, node)

    def advance(self, now: float) -> None:
        """Plan the learner's next steps and give them to it, as far as complete groups allow."""
        standing = (self._ledger.num_queue_changes, self.num_changes)
        if standing == self._advanced:
            return
        self._advanced = standing
        self.tempo.filled(self.next_step - 1 + len(self._ledger.complete) // self._settings.groups_per_step, now)
        if self._settings.dynamic_sampling:
            self._drop_flat_groups()
        if self.learner_version is None:
            return
        while self._given < self.learner_version + STEPS_AHEAD:
            step = self._given + 1
            if step == self.next_step:
                if not self._plan(now):
                    return
                self._begin(self.planned[-1])
            self._train(step, now)

    def sweep(self, now: float) -> None:
        """Drop rollouts that are too stale for the next step, and revoke leases whose rollouts would be too stale. An
        open group keeps its other rollouts and has the dropped ones sampled again: dropping the whole group would lose
        its problem, so problems with long completions would be trained too rarely."""
        oldest = oldest_useful_version(self._settings, self.next_step)
        for group in self._ledger.waiting_from_before(oldest):
            is_stale = group.oldest_version is not None and group.oldest_version < oldest
            goes_on = self._settings.mode == "async" and not group.complete and group.num_redraws < MAX_REDRAWS
            is_over = is_stale and not goes_on
            late = [rollout for rollout in group.still_leased if is_over or rollout.oldest_version < oldest]
            for rollout in late:
                self._ledger.note_missing(rollout, now)
            if is_over:
                self._ledger.drop_group(group, DropReason.STALE)
                continue
            self._ledger.revoke(late, DropReason.REVOKED)
            if is_stale:
                self._ledger.draw_newer(group, oldest)

    def _drop_flat_groups(self) -> None:
        flat, most = self._ledger.flat, MAX_FLAT_BATCHES * self._settings.groups_per_step
        while len(flat) and len(self._flat_groups) < most:
            group_id = flat[0]
            older = self._ledger.waiting.position(group_id)
            if self._settings.mode != "async" and older != self._ledger.complete.position(group_id):
                return  # An older group is still open, and groups are examined in order.
            self._tally.dropped_flat(group_id)
            self._rate([group_id])
            self._ledger.drop_group(self._ledger.groups[group_id], DropReason.NO_ADVANTAGE)
            if group_id > self._newest_planned_group:
                self._flat_groups.append(group_id)

    def _plan(self, now: float) -> bool:
        """Plan the next step and return True, if the run has a next step and enough groups are complete. Return False
        otherwise.
        """
        if self.next_step > self._settings.steps or not self._batch():
            return False
        self.sweep(now)
        batch = self._batch()
        if not batch:
            return False
        by_task = self._tally.planned(self._ledger.groups[group_id] for group_id in batch)
        self.planned.append(self._ledger.plan(self.next_step, batch, now, by_task=by_task))
        self._batch_sizes.append(len(batch))
        self._newest_planned_group = max(self._newest_planned_group, batch[-1])
        self._rate(batch)
        if self._curriculum is not None:
            self._curriculum.count(self._newest_planned_group)
        self._flat_groups = [group_id for group_id in self._flat_groups if group_id > self._newest_planned_group]
        # Planning has moved the next step on by one: drop rollouts that are too stale for it.
        self.sweep(now)
        return True

    def _rate(self, group_ids: Iterable[int]) -> None:
        if self._curriculum is None:
            return
        groups = [self._ledger.groups[group_id] for group_id in group_ids]
        results = [self._curriculum.result(group.group_id, group.prompt, group.rewards) for group in groups]
        self._out.record(GroupsRated(pass_rates=tuple((result.group_id, result.pass_rate) for result in results)))

    def _batch(self) -> tuple[int, ...]:
        """Return the groups of the next step, oldest first; empty if too few are complete. While the learner is
        computing, no group overtakes an older open group. Otherwise the older group might become too stale for every
        step."""
        complete, most, budget = self._ledger.complete, self._settings.groups_per_step, self._settings.tokens_per_step
        in_order = self._settings.mode != "async" or self.training is not None
        if in_order and not self._first_are_complete(self.outlook.next_batch):
            return ()
        if budget:
            tokens = 0
            for position in range(min(most, len(complete))):
                tokens += self._ledger.groups[complete[position]].num_tokens
                if tokens >= budget:
                    return complete.first(position + 1)
        return complete.first(most) if len(complete) >= most else ()

    def _begin(self, planned: StepRow) -> None:
        groups = [self._ledger.groups[group_id] for group_id in planned.group_ids]
        batch = [PlannedGroup(group.group_id, tuple(group.received_ids), tuple(group.rewards)) for group in groups]
        self._out.act(BeginStep(step=planned.step, batch=tuple(batch)))

    def _train(self, step: int, now: float) -> None:
        self._given = step
        self.num_changes += 1
        self.tempo.given(step, now)
        self._out.act(TrainStep(step=step))

    def _count_step(self, metrics: Mapping[str, float], screen: StepScreen, now: float) -> None:
        """Record the oldest planned batch as trained. Groups that the learner left out are dropped instead."""
        batch = self.planned.popleft()
        left_out = {batch.group_ids[place] for place in screen.left_out}
        self._ledger.train(batch, metrics, now, left_out=left_out)
        self.trained_steps = batch.step
        self._replayable.add(batch.step)

    def _publish_if_due(self) -> None:
        assert self.learner_version is not None
        due = self._settings.newest_due_version(self.learner_version)
        if due > max(self.published_version, self._publishing):
            self._publishing = due
            self._out.act(PublishVersion(policy_version=due))


def _curriculum(settings: CoordinatorSettings, snapshot: CoordinatorSnapshot) -> Curriculum | None:
    if settings.curriculum is None:
        return None
    return Curriculum(
        settings.curriculum,
        run_seed=settings.run_seed,
        mixture=settings.mixture,
        tasks=settings.tasks,
        results=snapshot.results,
        counted_to=snapshot.newest_planned_group,
    )
