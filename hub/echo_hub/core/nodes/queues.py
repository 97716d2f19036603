"""The nodes that have room, in the order in which they wait, by what can be asked of them.

    version   tier             speed class   nodes, who waited longest first
    7         0 (has idle)     -3            a, d
    7         1 (prefetches)   -3            b
    9         0                2             c

`first(8, fastest=-9, slowest=9)` begins with c; `first(7, fastest=-9, slowest=0)` with a. Nodes with idle places come
before those that would only queue what they get; among equals, whoever waited longest. A node that takes something goes
to the end.

Each change takes O(1), each search O(queues that are not empty): versions that nodes have times speed classes, whatever
the number of nodes. There is nothing to clean up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from math import inf

from echo_hub.core.nodes.node import UNPROVEN, Node

Place = tuple[int, int, int]
"""Where a node waits: version, tier, class of its pace."""


class ReadyQueues:
    def __init__(self) -> None:
        self._queues: dict[Place, OrderedDict[str, tuple[int, Node]]] = {}
        self._places: dict[str, Place] = {}
        self._turns = 0
        self.notice_from: float = -inf
        """Who is faster than this class is not looked for at present."""
        self.num_unproven = 0
        """Nodes that wait and have returned nothing yet."""

    def __len__(self) -> int:
        """Nodes that wait."""
        return len(self._places)

    def put(self, node: Node, place: Place | None) -> bool:
        """The node waits there, where it is already if that is the same; None: nowhere. Whether it is to be noticed."""
        before = self._places.get(node.node_id)
        if before == place:
            return False
        if before is not None:
            self._take_out(node.node_id, before)
        if place is None:
            return False
        self._turns += 1
        self.num_unproven += place[2] == UNPROVEN
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = OrderedDict()
        queue[node.node_id] = (self._turns, node)
        self._places[node.node_id] = place
        return place[2] >= self.notice_from or place[2] == UNPROVEN

    def slowest(self, oldest: int, enough: int) -> tuple[bool, int]:
        """Of the nodes of version `oldest` or newer: whether any is of class `enough` or slower, and the slowest class
        of the others; UNPROVEN: there are none."""
        slow_enough, slowest = False, UNPROVEN
        for version, _, speed in self._queues:
            if version >= oldest:
                if speed >= enough:
                    slow_enough = True
                elif speed > slowest:
                    slowest = speed
        return slow_enough, slowest

    def waits(self, node_id: str) -> bool:
        return node_id in self._places

    def to_the_end(self, node_id: str) -> None:
        """It has had its turn; harmless when it does not wait."""
        place = self._places.get(node_id)
        if place is not None:
            queue = self._queues[place]
            self._turns += 1
            queue[node_id] = (self._turns, queue[node_id][1])
            queue.move_to_end(node_id)

    def first(
        self, oldest: int, *, fastest: int, slowest: int, avoid: Collection[str] = (), by_speed: bool = False
    ) -> list[Node]:
        """Nodes of version `oldest` or newer and of these speed classes, the next of each queue that has one, best
        first. `by_speed`: the fastest class before all else."""
        found: list[tuple[int, int, int, Node]] = []
        for (version, tier, speed), queue in self._queues.items():
            if version >= oldest and fastest <= speed <= slowest:
                for node_id, (turn, node) in queue.items():
                    if node_id not in avoid:
                        found.append((tier, speed if by_speed else 0, turn, node))
                        break
        if len(found) > 1:
            found.sort(key=_order)
        return [node for _, _, _, node in found]

    def _take_out(self, node_id: str, place: Place) -> None:
        queue = self._queues[place]
        del queue[node_id]
        del self._places[node_id]
        self.num_unproven -= place[2] == UNPROVEN
        if not queue:
            del self._queues[place]


def _order(entry: tuple[int, int, int, Node]) -> tuple[int, int, int]:
    return entry[:3]
