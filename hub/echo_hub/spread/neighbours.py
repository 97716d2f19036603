"""Links between nodes: a full mesh in a small fleet, `degree` random neighbours per node in a large one.

Random graphs of this degree have short paths between all nodes and stay connected when many nodes fail. Joins and
leaves change few links. A newcomer is inserted into random links, so no other node gets more neighbours. The neighbours
of a leaving node link with each other (Law and Siu, Distributed Construction of Random Expander Networks, 2003).
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Final

TRIES: Final = 4
"""Number of random links tried for each link that a newcomer still needs."""


class Neighbours:
    """Links of all nodes, at most `degree` per node. `draw(n)` returns a random number below n."""

    def __init__(self, *, degree: int, draw: Callable[[int], int]) -> None:
        self._degree = degree
        self._draw = draw
        self._of: dict[str, dict[str, None]] = {}
        self._names: list[str] = []
        self._place: dict[str, int] = {}
        self._deaf: set[str] = set()
        self._short: dict[str, None] = {}
        """Nodes with fewer than `degree` neighbours."""

    def of(self, node_id: str) -> Set[str]:
        return self._of.get(node_id, {}).keys()

    def join(self, node_id: str, *, listens: bool) -> None:
        """Add a node. `listens`: others can connect to it. Two nodes that do not listen are never linked."""
        if node_id in self._of:
            return
        self._of[node_id] = {}
        self._place[node_id] = len(self._names)
        self._names.append(node_id)
        self._short[node_id] = None
        if not listens:
            self._deaf.add(node_id)
        self._fill(node_id)
        for _ in range(TRIES * self._degree):
            if len(self._of[node_id]) + 2 > self._degree:
                break
            self._splice(node_id)

    def leave(self, node_id: str) -> None:
        """Remove a node, and link its neighbours with each other."""
        if node_id not in self._of:
            return
        left = list(self._of[node_id])
        for other in left:
            self._unlink(node_id, other)
        del self._of[node_id]
        self._short.pop(node_id, None)
        self._deaf.discard(node_id)
        last, place = self._names.pop(), self._place.pop(node_id)
        if last != node_id:
            self._names[place] = last
            self._place[last] = place
        for other in left:
            self._fill(other)

    def _fill(self, node_id: str) -> None:
        others = [other for other in self._short if self._may(node_id, other)]
        while others and len(self._of[node_id]) < self._degree:
            place = self._draw(len(others))
            others[place], others[-1] = others[-1], others[place]
            self._link(node_id, others.pop())

    def _splice(self, node_id: str) -> None:
        """Replace a random link between two nodes by links of both to this node, if these links are allowed."""
        one = self._names[self._draw(len(self._names))]
        if not self._of[one]:
            return
        other = list(self._of[one])[self._draw(len(self._of[one]))]
        if self._may(node_id, one) and self._may(node_id, other):
            self._unlink(one, other)
            self._link(node_id, one)
            self._link(node_id, other)

    def _may(self, one: str, other: str) -> bool:
        return one != other and other not in self._of[one] and not (one in self._deaf and other in self._deaf)

    def _link(self, one: str, other: str) -> None:
        for mine, theirs in ((one, other), (other, one)):
            self._of[mine][theirs] = None
            if len(self._of[mine]) >= self._degree:
                self._short.pop(mine, None)

    def _unlink(self, one: str, other: str) -> None:
        for mine, theirs in ((one, other), (other, one)):
            del self._of[mine][theirs]
            self._short[mine] = None
