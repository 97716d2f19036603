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
from itertools import islice
from math import inf

from echo_hub.core.nodes.node import UNPROVEN, Node, Place


class ReadyQueues:
    """Each node's record says where it waits; nobody else changes that. A search finds the first of each queue alone
    that is not left out: who waits behind these changes nothing, until he is one of them."""

    def __init__(self) -> None:
        self._queues: dict[Place, OrderedDict[str, tuple[int, Node]]] = {}
        self._turns = 0
        self._num_waiting = 0
        self.notice_from: float = -inf
        """Who is faster than this class is not looked for at present."""
        self.most_avoided = 0
        """No search leaves out more nodes than that."""
        self.num_unproven = 0
        """Nodes that wait and have returned nothing yet."""

    def __len__(self) -> int:
        """Nodes that wait."""
        return self._num_waiting

    def put(self, node: Node, place: Place | None) -> bool:
        """The node waits there, where it is already if that is the same; None: nowhere. Whether a search may find
        somebody whom it did not find before, and who is to be noticed."""
        before = node.place
        if before == place:
            return False
        noticed = before is not None and self._take_out(node, before)
        node.place = place
        if place is None:
            return noticed
        self._turns += 1
        self._num_waiting += 1
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = OrderedDict()
        is_found = len(queue) <= self.most_avoided
        queue[node.node_id] = (self._turns, node)
        self.num_unproven += place[2] == UNPROVEN
        return noticed or (is_found and self._heeds(place))

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

    def is_found(self, node: Node) -> bool:
        """Whether it is among the first where it waits, so that a search may find it."""
        return node.place is not None and self._is_first(self._queues[node.place], node.node_id)

    def to_the_end(self, node: Node) -> bool:
        """It has had its turn; harmless when it does not wait. As `put`."""
        if node.place is None:
            return False
        queue = self._queues[node.place]
        noticed = self._hides_another(queue, node.node_id) and self._heeds(node.place)
        self._turns += 1
        queue[node.node_id] = (self._turns, node)
        queue.move_to_end(node.node_id)
        return noticed

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

    def _take_out(self, node: Node, place: Place) -> bool:
        queue = self._queues[place]
        noticed = self._hides_another(queue, node.node_id) and self._heeds(place)
        del queue[node.node_id]
        self._num_waiting -= 1
        self.num_unproven -= place[2] == UNPROVEN
        if not queue:
            del self._queues[place]
        return noticed

    def _is_first(self, queue: OrderedDict[str, tuple[int, Node]], node_id: str) -> bool:
        """Whether a search may find it there."""
        return node_id in islice(queue, self.most_avoided + 1)

    def _hides_another(self, queue: OrderedDict[str, tuple[int, Node]], node_id: str) -> bool:
        """Whether a search that finds it there would find another if it were gone."""
        return next(reversed(queue)) != node_id and self._is_first(queue, node_id)

    def _heeds(self, place: Place) -> bool:
        return place[2] >= self.notice_from or place[2] == UNPROVEN


def _order(entry: tuple[int, int, int, Node]) -> tuple[int, int, int]:
    return entry[:3]
