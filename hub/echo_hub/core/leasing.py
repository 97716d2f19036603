"""Who works on what: deadlines, and new leases for the oldest groups first.

A lease goes whole to one node that has room for it; what is left over goes to further nodes. An index that failed on a
node is offered to others first; to the same one only when no other takes work.

Beside training, others may own groups: evaluations. While training and one of these both want leases, one of
`EVALUATION_SHARE` leased rollouts is the other's, counted from the last time that it wanted none; what training does
not want, it gets too. So neither starves the other: training waits no longer than a node takes to finish what it holds.

The first turns of a group's episodes share a prompt and a seed, and so may share a lease. Each later turn is a lease of
its own, with a seed of its own; within a group, the episodes that are furthest come first.

A turn whose completion the scorer failed on is drawn again with another seed: the same one would give the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Final

from echo_hub.core.admission import Outlook, oldest_useful_version
from echo_hub.core.effects import RolloutsLeased, SendLease
from echo_hub.core.groups import GroupOwner, RolloutGroup, Slot
from echo_hub.core.ledger import Ledger
from echo_hub.core.nodes.node import Node
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.outbox import Outbox
from echo_hub.core.settings import CoordinatorSettings
from echo_shared.draws import derive_seed
from echo_shared.messages import ReceiptState, rollout_id

EVALUATION_SHARE: Final = 4


def turn_seed(group_seed: int, turn: int, attempt: int = 0) -> int:
    """The seed of the draws of one turn of a group's episodes. `attempt`: so often the scorer has failed on it."""
    if attempt:
        return derive_seed(group_seed, turn, attempt)
    return derive_seed(group_seed, turn) if turn else group_seed


class _Share:
    """What an owner beside training is due: it grows by one with each rollout leased to another owner while this one
    wants leases too."""

    def __init__(self, owner: GroupOwner) -> None:
        self.owner = owner
        self.due = 0

    def leased(self, owner: GroupOwner, num_rollouts: int) -> None:
        if owner is self.owner:
            if self.due > 0:  # Else nobody else wanted it.
                self.due -= (EVALUATION_SHARE - 1) * num_rollouts
        elif len(self.owner.wanting):
            self.due += num_rollouts
        else:
            self.due = 0


class Leasing:
    """`_deadlines` holds each lease once, with those of its rollouts that it had at first. `beside`: the owners of
    groups that are not the learner's."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        ledger: Ledger,
        nodes: Nodes,
        out: Outbox,
        beside: Iterable[GroupOwner],
        next_lease_id: int,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._nodes = nodes
        self._out = out
        self._next_lease_id = next_lease_id
        self._deadlines: list[tuple[float, int, tuple[int, ...]]] = []
        self._shares = [_Share(owner) for owner in beside]

    def watch(self, lease_id: int, indices: tuple[int, ...], deadline: float) -> None:
        """From its deadline on, the unfinished rollouts of the lease are leased again."""
        heappush(self._deadlines, (deadline, lease_id, indices))

    def expire(self, now: float) -> None:
        """Everything whose deadline has passed is leased again."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id, indices = heappop(self._deadlines)
            for index in indices:
                rollout = self._ledger.rollouts.get(rollout_id(lease_id, index))
                if rollout is not None and rollout.state is ReceiptState.LEASED and not rollout.overdue:
                    self._ledger.expire(rollout, now)

    def dispatch(self, owner: GroupOwner, now: float, *, newest_version: int, outlook: Outlook) -> None:
        """Leases the groups that wait for the learner until no ready node is left, or nothing that it may do.
        `newest_version`: what a lease may name."""
        wanting = owner.wanting
        turn = 0
        while turn < len(wanting):
            group = self._ledger.groups[wanting[turn]]
            position = self._ledger.waiting.position(group.group_id)
            oldest = oldest_useful_version(self._settings, outlook.step_of(position))
            if oldest > newest_version:
                return
            bucket = oldest if self._settings.mode == "async" else 0
            if self._nodes.next_ready(bucket, ()) is None:
                return  # Younger groups need versions at least as new.
            while group.unleased and self._lease_some(group, bucket, now):
                pass
            turn += bool(group.unleased)

    def dispatch_beside(self, now: float, *, within_share: bool) -> None:
        """Leases all other groups: only what is due to their owners beside training, or all that nodes take."""
        for share in self._shares:
            wanting = share.owner.wanting
            turn = 0
            while turn < len(wanting) and (share.due > 0 or not within_share):
                if self._nodes.next_ready(0, ()) is None:
                    return
                turn += not self._lease_some(self._ledger.groups[wanting[turn]], 0, now)

    def _lease_some(self, group: RolloutGroup, bucket: int, now: float) -> bool:
        """One lease of the group, to the next node that may take an index of it. False when there is none."""
        tried: set[tuple[str, ...]] = set()
        for index in sorted(group.unleased, key=lambda index: (-group.slots[index].turn, index)):
            avoid = self._avoided(group.slots[index], bucket)
            if avoid in tried:
                continue
            tried.add(avoid)
            node = self._nodes.next_ready(bucket, avoid)
            if node is not None:
                turn = group.slots[index].turn
                indices = (index,) if turn else self._first_turns(node, group, index, bucket)
                self._lease_to(node, group, indices, now)
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

    def _lease_to(self, node: Node, group: RolloutGroup, indices: tuple[int, ...], now: float) -> None:
        first = group.slots[indices[0]]
        turn = first.turn
        lease_id = self._next_lease_id
        self._next_lease_id += 1
        version = group.owner.lease_version(group, node)
        for share in self._shares:
            share.leased(group.owner, len(indices))
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

    def _avoided(self, slot: Slot, bucket: int) -> tuple[str, ...]:
        """The nodes that the index is kept from: those it failed on, as long as any other node takes work."""
        failed = slot.failed_on
        if not failed:
            return ()
        candidates = self._nodes.num_candidates(bucket)
        if candidates > self._nodes.num_candidates(bucket, among=failed):
            return failed
        # It has failed on all of them: another round, in which the latest is asked last.
        return failed[-1:] if candidates > 1 else ()
