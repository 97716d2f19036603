"""Who works on what: deadlines, and new leases for the oldest groups first.

A lease goes whole to one node that has room for it; what is left over goes to further nodes. An index that failed on a
node is offered to others first; to the same one only when no other takes work.
"""

from __future__ import annotations

from heapq import heappop, heappush

from echo_hub.core.admission import oldest_useful_version
from echo_hub.core.effects import RolloutsLeased, SendLease
from echo_hub.core.fleet import Fleet, Node
from echo_hub.core.groups import RolloutGroup, Slot
from echo_hub.core.ledger import Ledger
from echo_hub.core.outbox import Outbox
from echo_hub.core.settings import CoordinatorSettings
from echo_shared.messages import ReceiptState, rollout_id


class Leasing:
    """`_deadlines` holds each lease once, with those of its rollouts that it had at first."""

    def __init__(
        self, settings: CoordinatorSettings, *, ledger: Ledger, fleet: Fleet, out: Outbox, next_lease_id: int
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._fleet = fleet
        self._out = out
        self._next_lease_id = next_lease_id
        self._deadlines: list[tuple[float, int, tuple[int, ...]]] = []

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

    def dispatch(self, now: float, *, newest_version: int, next_step: int) -> None:
        """Leases until no ready node is left, or nothing that it may do. `newest_version`: what a lease may name."""
        self._fleet.wake(now)
        wanting = self._ledger.wanting
        turn = 0
        while turn < len(wanting):
            group = self._ledger.groups[wanting[turn]]
            position = self._ledger.waiting.position(group.group_id)
            oldest = oldest_useful_version(self._settings, next_step=next_step, position=position)
            if oldest > newest_version:
                return
            bucket = oldest if self._settings.mode == "async" else 0
            if self._fleet.next_ready(bucket, ()) is None:
                return  # Younger groups need versions at least as new.
            while group.unleased and self._lease_some(group, bucket, newest_version, now):
                pass
            turn += bool(group.unleased)

    def _lease_some(self, group: RolloutGroup, bucket: int, newest_version: int, now: float) -> bool:
        """One lease of the group, to the next node that may take an index of it. False when there is none."""
        tried: set[tuple[str, ...]] = set()
        for index in sorted(group.unleased):
            avoid = self._avoided(group.slots[index], bucket)
            if avoid in tried:
                continue
            tried.add(avoid)
            node = self._fleet.next_ready(bucket, avoid)
            if node is not None:
                self._lease_to(node, group, bucket, newest_version, now)
                return True
        return False

    def _lease_to(self, node: Node, group: RolloutGroup, bucket: int, newest_version: int, now: float) -> None:
        may = [i for i in sorted(group.unleased) if node.node_id not in self._avoided(group.slots[i], bucket)]
        indices = tuple(may[: node.free])
        lease_id = self._next_lease_id
        self._next_lease_id += 1
        version = newest_version
        if self._settings.mode == "async" and node.policy_version is not None:
            version = min(newest_version, node.policy_version)
        deadline = now + self._settings.deadline_s
        self._ledger.lease(
            RolloutsLeased(
                lease_id=lease_id,
                node_id=node.node_id,
                group_id=group.group_id,
                indices=indices,
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
                seed=group.seed,
                policy_version=version,
                deadline_s=self._settings.deadline_s,
            )
        )

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
