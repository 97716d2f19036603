"""Who works on what: deadlines, and new leases for the oldest groups first.

A lease goes whole to one node that has room for it; what is left over goes to further nodes. An index that failed on a
node is offered to others first; to the same one only when no other takes work.

While training and evaluations both want leases, one of `EVALUATION_SHARE` leased rollouts is an evaluation's, counted
from the last time that none was wanted; what training does not want, evaluations get too. So neither starves the other:
training waits for an evaluation no longer than a node takes to finish what it holds.

The first turns of a group's episodes share a prompt and a seed, and so may share a lease. Each later turn is a lease of
its own, with a seed of its own; within a group, the episodes that are furthest come first.

A turn whose completion the scorer failed on is drawn again with another seed: the same one would give the same tokens.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from echo_hub.core.admission import Outlook, oldest_useful_version
from echo_hub.core.effects import RolloutsLeased, SendLease
from echo_hub.core.groups import RolloutGroup, Slot
from echo_hub.core.ledger import Ledger
from echo_hub.core.nodes.ready import Fleet, Node
from echo_hub.core.outbox import Outbox
from echo_hub.core.settings import CoordinatorSettings
from echo_shared.draws import derive_seed
from echo_shared.messages import ReceiptState, rollout_id

EVALUATION_SHARE: Final = 4


def turn_seed(group_seed: int, turn: int, attempt: int = 0) -> int:
    """Of the draws of one turn of a group's episodes. `attempt`: so often the scorer has failed on this turn."""
    if attempt:
        return derive_seed(group_seed, turn, attempt)
    return derive_seed(group_seed, turn) if turn else group_seed


class Leasing:
    """`_deadlines` holds each lease once, with those of its rollouts that it had at first; `_evaluations_due` grows by
    one with each rollout that is leased for training while an evaluation waits."""

    def __init__(
        self, settings: CoordinatorSettings, *, ledger: Ledger, fleet: Fleet, out: Outbox, next_lease_id: int
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._fleet = fleet
        self._out = out
        self._next_lease_id = next_lease_id
        self._deadlines: list[tuple[float, int, tuple[int, ...]]] = []
        self._evaluations_due = 0

    def watch(self, lease_id: int, indices: tuple[int, ...], deadline: float) -> None:
        """From its deadline on, the unfinished rollouts of the lease are leased again."""
        heappush(self._deadlines, (deadline, lease_id, indices))

    def expire(self, now: float) -> None:
        """Looks at the deadlines."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id, indices = heappop(self._deadlines)
            for index in indices:
                rollout = self._ledger.rollouts.get(rollout_id(lease_id, index))
                if rollout is not None and rollout.state is ReceiptState.LEASED and not rollout.overdue:
                    self._ledger.expire(rollout, now)

    def dispatch(self, now: float, *, newest_version: int, outlook: Outlook) -> None:
        """Leases for training until no ready node is left, or nothing that it may do. `newest_version`: what a lease
        may name."""
        wanting = self._ledger.wanting
        turn = 0
        while turn < len(wanting):
            group = self._ledger.groups[wanting[turn]]
            position = self._ledger.waiting.position(group.group_id)
            oldest = oldest_useful_version(self._settings, outlook.step_of(position))
            if oldest > newest_version:
                return
            bucket = oldest if self._settings.mode == "async" else 0
            if self._fleet.next_ready(bucket, ()) is None:
                return  # Younger groups need versions at least as new.
            while group.unleased and self._lease_some(group, bucket, newest_version, now):
                pass
            turn += bool(group.unleased)

    def dispatch_evaluations(self, now: float, *, within_share: bool) -> None:
        """The same for evaluations: only what is due to them beside training, or all that nodes take."""
        wanting = self._ledger.wanting_evaluation
        turn = 0
        while turn < len(wanting) and (self._evaluations_due > 0 or not within_share):
            group = self._ledger.groups[wanting[turn]]
            assert group.pinned_version is not None
            if self._fleet.next_ready(0, ()) is None:
                return
            turn += not self._lease_some(group, 0, group.pinned_version, now)

    def _lease_some(self, group: RolloutGroup, bucket: int, newest_version: int, now: float) -> bool:
        """One lease of the group, to the next node that may take an index of it. False when there is none."""
        tried: set[tuple[str, ...]] = set()
        for index in sorted(group.unleased, key=lambda index: (-group.slots[index].turn, index)):
            avoid = self._avoided(group.slots[index], bucket)
            if avoid in tried:
                continue
            tried.add(avoid)
            node = self._fleet.next_ready(bucket, avoid)
            if node is not None:
                turn = group.slots[index].turn
                indices = (index,) if turn else self._first_turns(node, group, index, bucket)
                self._lease_to(node, group, indices, newest_version, now)
                return True
        return False

    def _first_turns(self, node: Node, group: RolloutGroup, like: int, bucket: int) -> tuple[int, ...]:
        """As many indices of the group, all at their first turn with the seed of index `like`, as the node may take."""
        attempt = group.slots[like].scorer_failures
        may = [
            index
            for index, slot in ((index, group.slots[index]) for index in sorted(group.unleased))
            if (slot.turn, slot.scorer_failures) == (0, attempt) and node.node_id not in self._avoided(slot, bucket)
        ]
        return tuple(may[: node.free])

    def _lease_to(
        self, node: Node, group: RolloutGroup, indices: tuple[int, ...], newest_version: int, now: float
    ) -> None:
        first = group.slots[indices[0]]
        turn = first.turn
        lease_id = self._next_lease_id
        self._next_lease_id += 1
        version = newest_version
        if group.pinned_version is None and self._settings.mode == "async" and node.policy_version is not None:
            version = min(newest_version, node.policy_version)
        self._keep_share(group, len(indices))
        deadline = now + self._settings.deadline_s
        self._ledger.lease(
            RolloutsLeased(
                lease_id=lease_id,
                node_id=node.node_id,
                group_id=group.group_id,
                indices=indices,
                turn=turn,
                policy_version=version,
                deadline=deadline,
            )
        )
        self.watch(lease_id, indices, deadline)
        self._out.act(
            SendLease(
                node_id=node.node_id,
                lease_id=lease_id,
                group_id=group.group_id,
                indices=indices,
                turn=turn,
                seed=turn_seed(group.seed, turn, first.scorer_failures),
                policy_version=version,
                deadline_s=self._settings.deadline_s,
            )
        )

    def _keep_share(self, group: RolloutGroup, num_rollouts: int) -> None:
        if group.pinned_version is not None:
            if self._evaluations_due > 0:  # Else nobody else wanted it.
                self._evaluations_due -= (EVALUATION_SHARE - 1) * num_rollouts
        elif len(self._ledger.wanting_evaluation):
            self._evaluations_due += num_rollouts
        else:
            self._evaluations_due = 0

    def _avoided(self, slot: Slot, bucket: int) -> tuple[str, ...]:
        """The nodes that the index is kept from: those it failed on, as long as any other node takes work."""
        failed = slot.failed_on
        if not failed:
            return ()
        candidates = self._fleet.num_candidates(bucket)
        if candidates > self._fleet.num_candidates(bucket, among=failed):
            return failed
        # It has failed on all of them: another round, in which the latest is asked last.
        return failed[-1:] if candidates > 1 else ()
