"""A plain dispatch, with which the hub's dispatch is compared: whole groups, in order, as soon as possible.

`plain(spread=False, aware=False)` leases

- whole groups, each to one node; rollouts that a node gives back or loses go to further nodes;
- without regard to speed and length: groups in the order of their opening, to nodes in the order in which they get
capacity for a whole lease;
- as soon as admission allows, not just in time;
- up to each node's claimed capacity.

Option `spread` leases group members separately, one member at a time. With `aware`, the groups of a step that are
likely to become the longest come first, and go to the fastest node with free capacity.

The rest is the hub's own: admission, the staleness bound, sweeps, revocations, deadlines, and repeated leases."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import inf

from echo_hub.core.admission import Outlook, oldest_useful_version
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.groups import GroupOwner, RolloutGroup
from echo_hub.core.leasing import Leasing
from echo_hub.core.ledger import Ledger
from echo_hub.core.nodes.node import Node
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.outbox import Outbox
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.core.snapshot import CoordinatorSnapshot
from echo_hub.core.tempo import Tempo
from echo_hub.core.terms import Terms
from echo_hub.simulator.world import MakeCoordinator


class PlainLeasing(Leasing):
    """`_ready` holds the nodes with capacity for a whole lease, in the order in which they got it."""

    def __init__(
        self, settings: CoordinatorSettings, *, ledger: Ledger, nodes: Nodes, out: Outbox, spread: bool, aware: bool
    ) -> None:
        super().__init__(settings, ledger=ledger, nodes=nodes, out=out, beside=(), next_lease_id=0)
        self._spread = spread
        self._aware = aware
        self._ready: dict[str, Node] = {}

    def begin_turn(self, now: float) -> bool:
        """Lease in each turn: a claimed capacity is no change that `Nodes` notices."""
        super().begin_turn(now)
        return True

    def dispatch(
        self, owner: GroupOwner, now: float, *, newest_version: int, outlook: Outlook, tempo: Tempo, num_changes: int
    ) -> None:
        """Lease until no node has capacity, or no group may be leased."""
        self._look_for_room()
        self._takers.begin()
        position = 0
        while position < len(owner.wanting) and self._ready:
            groups, oldest = self._next_groups(owner, position, outlook)
            if oldest > newest_version or self._next_node(oldest, ()) is None:
                return  # Later groups need versions that are at least as new.
            for group in groups:
                while group.unleased and self._lease_plainly(group, oldest, now):
                    pass
                position += bool(group.unleased)

    def _look_for_room(self) -> None:
        least = 1 if self._spread else self._settings.group_size
        for node_id, node in self._nodes._nodes.items():
            if node.candidate is not None and _room(node) >= min(least, node.capacity):
                self._ready.setdefault(node_id, node)
            else:
                self._ready.pop(node_id, None)
        for node_id in [node_id for node_id in self._ready if node_id not in self._nodes._nodes]:
            del self._ready[node_id]

    def _next_groups(self, owner: GroupOwner, position: int, outlook: Outlook) -> tuple[list[RolloutGroup], int]:
        """Return the next group, or all groups of its step, and the oldest version that they may use."""
        ledger, wanting = self._ledger, owner.wanting
        step = outlook.step_of(ledger.waiting.position(wanting[position]))
        oldest = oldest_useful_version(self._settings, step) if self._settings.mode == "async" else 0
        last = position + 1
        if self._aware:
            end = outlook.end_of(step)
            last = wanting.position(ledger.waiting[end]) if end < len(ledger.waiting) else len(wanting)
        groups = [ledger.groups[wanting[place]] for place in range(position, last)]
        return sorted(groups, key=_shortness) if self._aware else groups, oldest

    def _next_node(self, oldest: int, avoid: Iterable[str]) -> Node | None:
        may = (
            node
            for node_id, node in self._ready.items()
            if node_id not in avoid and node.candidate is not None and node.candidate >= oldest
        )
        return min(may, key=_slowness, default=None) if self._aware else next(may, None)

    def _lease_plainly(self, group: RolloutGroup, oldest: int, now: float) -> bool:
        """Lease a part of the group. Return False if no node may take an index of it."""
        avoided = {index: self._takers.avoided(group.slots[index], oldest) for index in sorted(group.unleased)}
        for avoid in dict.fromkeys(avoided.values()):
            node = self._next_node(oldest, avoid)
            if node is not None:
                may = [index for index, nodes in avoided.items() if node.node_id not in nodes]
                self._lease_to(node, group, tuple(may[: 1 if self._spread else _room(node)]), Terms(oldest), now)
                del self._ready[node.node_id]
                self._look_for_room_of(node)
                return True
        return False

    def _look_for_room_of(self, node: Node) -> None:
        """Queue a node with remaining capacity again, behind all others."""
        least = 1 if self._spread else self._settings.group_size
        if _room(node) >= min(least, node.capacity):
            self._ready[node.node_id] = node

    def _lateness_s(self, node: Node, group: RolloutGroup, count: int, terms: Terms) -> float:
        """Return infinity: no rollout is late before its deadline."""
        return inf


class PlainCoordinator(Coordinator):
    def __init__(
        self, settings: CoordinatorSettings, snapshot: CoordinatorSnapshot, *, spread: bool, aware: bool
    ) -> None:
        super().__init__(settings, snapshot)
        self._leasing = PlainLeasing(
            settings, ledger=self._ledger, nodes=self._nodes, out=self._out, spread=spread, aware=aware
        )


def plain(*, spread: bool, aware: bool) -> MakeCoordinator:
    """Return a factory of such coordinators, which can be pickled."""
    return partial(PlainCoordinator, spread=spread, aware=aware)


def _room(node: Node) -> int:
    return node.capacity - node.in_flight


def _shortness(group: RolloutGroup) -> float:
    return -group.expected_tokens


def _slowness(node: Node) -> float:
    """Seconds a token; nodes without a returned rollout have 0, which puts these nodes first."""
    return node.pace.token_s
