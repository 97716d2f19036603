"""Queues of nodes with free capacity, one for each combination of version, tier and speed class. Tier 1 has the nodes
with at least half of their capacity in use; they would only queue new work. A smaller speed class is faster.

    version   tier             speed class   nodes, longest waiting first
    7         0 (has idle)     -3            a, d
    7         1 (prefetches)   -3            b
    9         0                2             c

`first(8, fastest=-9, slowest=9)` begins with c; `first(7, fastest=-9, slowest=0)` with a. Tier 0 comes first, then the
longest waiting node. A node that takes work moves to the end of its queue.

Each change takes O(1). Each search takes O(non-empty queues), independent of the number of nodes. Empty queues are
deleted at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from itertools import islice
from math import inf

from echo_hub.core.nodes.node import UNPROVEN, Node, Place


class ReadyQueues:
    """All queues of nodes with free capacity. `Node.place` names the queue of a node, and only this class changes it. A
    search returns at most one node of each queue: the first one that it need not skip."""

    def __init__(self) -> None:
        self._queues: dict[Place, OrderedDict[str, tuple[int, Node]]] = {}
        self._turns = 0
        self._num_waiting = 0
        self.notice_from: float = -inf
        """Fastest speed class of proven nodes whose changes are reported: at present there is no work for faster ones.
        Changes of unproven nodes are always reported.
        """
        self.most_avoided = 0
        """Largest number of nodes that a search skips because the work failed on them. So a search returns one of the
        first `most_avoided` + 1 nodes of a queue.
        """
        self.num_unproven = 0

    def __len__(self) -> int:
        return self._num_waiting

    def put(self, node: Node, place: Place | None) -> bool:
        """Move the node to the queue `place`; None removes it from all queues.

        Return True if a search may now find a node that it did not find before, and that could take work.
        """
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
        """Examine the waiting nodes of version `oldest` or newer.

        Return True if one of them is of speed class `enough` or slower. Also return the slowest class among the nodes
        that are faster than `enough` (UNPROVEN: there are none).
        """
        slow_enough, slowest = False, UNPROVEN
        for version, _, speed in self._queues:
            if version >= oldest:
                if speed >= enough:
                    slow_enough = True
                elif speed > slowest:
                    slowest = speed
        return slow_enough, slowest

    def is_found(self, node: Node) -> bool:
        """Return True if searches may return the node, because it is near the front of its queue."""
        return node.place is not None and self._is_first(self._queues[node.place], node.node_id)

    def to_the_end(self, node: Node) -> bool:
        """Move a waiting node to the end of its queue. Return True if a search may now find another node, which could
        take work."""
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
        """Return the first node of each matching queue that is not in `avoid`, best first.

        A queue matches if its version is `oldest` or newer and its speed class is within `fastest` and `slowest`.
        `by_speed`: prefer faster nodes to those that wait longer.
        """
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
        return node_id in islice(queue, self.most_avoided + 1)

    def _hides_another(self, queue: OrderedDict[str, tuple[int, Node]], node_id: str) -> bool:
        """Return True if removing this node would let searches find another node of this queue."""
        return next(reversed(queue)) != node_id and self._is_first(queue, node_id)

    def _heeds(self, place: Place) -> bool:
        return place[2] >= self.notice_from or place[2] == UNPROVEN


def _order(entry: tuple[int, int, int, Node]) -> tuple[int, int, int]:
    return entry[:3]
