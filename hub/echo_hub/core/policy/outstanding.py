"""Leases that nodes hold: sent again after a reconnect, and watched until their rollouts arrive, are late or overdue.

A rollout is *late* if its node needs far longer than the longest completions take, or has left. Then another node may
lease the index too, and the first valid result wins. A rollout is *overdue* after its deadline: the node has probably
lost it. A reconnected node is sent its leases again, because the broken connection may have lost them. Such a message
also has the tokens that the hub has already received of the lease's rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Final, Literal

from echo_hub.core.accounting.effects import SendLease
from echo_hub.core.accounting.groups import LeasedRollout, turn_seed
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.nodes.ready import Nodes
from echo_shared.wire.messages import rollout_id

LEFT_S: Final = 10.0
"""Seconds that a disconnected node has to return before its rollouts count as late. Set by hand."""
LOOKED_AT_ONCE: Final = 256
"""Maximum number of leases whose lateness or deadline is handled in one turn of the coordinator. Set by hand."""


class OutstandingLeases:
    """Leases that nodes hold. `_watched` is a heap of (time, reason, lease id, indices): the time at which the lease
    may become late, pass its deadline, or lose its absent node."""

    def __init__(self, *, ledger: Ledger, nodes: Nodes, out: Outbox) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._out = out
        self._watched: list[tuple[float, Literal["late", "away", "overdue"], int, tuple[int, ...]]] = []
        self._unsent: set[str] = set()
        """Connected nodes that have not been sent their current leases since they connected."""

    @property
    def due_at(self) -> float:
        """Return the time at which the next watched lease must be handled; inf = none."""
        return self._watched[0][0] if self._watched else inf

    def watch(self, lease_id: int, indices: tuple[int, ...], deadline: float, *, late_at: float = inf) -> None:
        """Watch the lease: at `late_at` its unfinished rollouts become late, and at its deadline their indices may be
        leased again."""
        heappush(self._watched, (deadline, "overdue", lease_id, indices))
        if late_at < deadline:
            heappush(self._watched, (late_at, "late", lease_id, indices))

    def look_after(self, now: float) -> None:
        for _ in range(LOOKED_AT_ONCE):
            if not self._watched:
                return
            at, what, lease_id, indices = self._watched[0]
            still_leased = self._still_leased(lease_id, indices)
            if at > now and still_leased:
                return
            heappop(self._watched)
            for rollout in still_leased:
                if what == "overdue":
                    self._ledger.expire(rollout, now)
                elif not rollout.late and (what == "late" or not self._nodes.is_connected(rollout.node_id)):
                    self._ledger.mark_late(rollout, now, is_slow=what == "late")

    def _still_leased(self, lease_id: int, indices: Iterable[int]) -> list[LeasedRollout]:
        found = (self._ledger.rollouts.get(rollout_id(lease_id, index)) for index in indices)
        return [rollout for rollout in found if rollout is not None and rollout.in_time]

    def left(self, node_id: str, now: float) -> None:
        """Watch the leases of a node that disconnected: if it stays away for `LEFT_S`, their rollouts count as late."""
        self._unsent.discard(node_id)
        for lease_id, of_lease in self._held_leases(node_id):
            heappush(self._watched, (now + LEFT_S, "away", lease_id, tuple(rollout.index for rollout in of_lease)))

    def came(self, node_id: str) -> None:
        """Remember that the node connected: its leases are sent again after its first report."""
        self._unsent.add(node_id)

    def send_again(self, node_id: str, now: float) -> None:
        """Send the node its current leases once after a reconnect. A node ignores leases that it still has."""
        if node_id in self._unsent:
            self._unsent.discard(node_id)
            for _, of_lease in self._held_leases(node_id):
                self.send(of_lease, now)

    def _held_leases(self, node_id: str) -> list[tuple[int, list[LeasedRollout]]]:
        leases: dict[int, list[LeasedRollout]] = {}
        for rollout in self._ledger.held_by(node_id):
            if not rollout.overdue:
                leases.setdefault(rollout.lease_id, []).append(rollout)
        return sorted(leases.items())

    def send(
        self, rollouts: Sequence[LeasedRollout], now: float, goes_on: tuple[tuple[int, int], ...] | None = None
    ) -> None:
        """Send rollouts of one lease to its node. `goes_on`: pairs of index and earlier lease whose tokens the index
        continues. None: the lease is sent again, and each index continues its own tokens that the hub has received."""
        first = rollouts[0]
        group = self._ledger.groups[first.group_id]
        self._out.act(
            SendLease(
                node_id=first.node_id,
                lease_id=first.lease_id,
                group_id=first.group_id,
                indices=tuple(rollout.index for rollout in rollouts),
                turn=first.turn,
                seed=turn_seed(group.seed, first.turn, group.slots[first.index].scorer_failures),
                policy_version=first.policy_version,
                deadline_s=first.deadline - now,
                may_move_on=group.owner.may_move_on,
                goes_on=goes_on if goes_on is not None else tuple((each.index, each.lease_id) for each in rollouts),
                sampling=group.sampling,
                tenant=group.tenant,
            )
        )
