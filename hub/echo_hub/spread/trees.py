"""Relay trees over the links between nodes. A tree brings a piece from its root to all other nodes.

Example: nodes a, b, c, d linked in a ring, with equal, idle uplinks; a is the root:

    a → b, d      both have it when a has sent two copies
    b → c         the node that is free first serves the last one

If node a were busy with another piece for as long as four copies take, a tree with root b would let node a send no
copy. So over all pieces together, each node sends copies in proportion to its speed. Copies that a node sends in
parallel count as arriving together, because they share its uplink.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Final

from echo_shared.wire import relay_tree

MOST_IN_A_STAR: Final = 12
"""Largest fleet with star trees. With more nodes, one node would send too many copies before the last node gets a piece
to hand on."""

FAN_OUT: Final = 3
"""Copies that a node sends in parallel.

More copies take longer, fewer make the tree deeper. For many nodes the total time grows with FAN_OUT / log FAN_OUT,
which is smallest at 3. After these copies a node serves more nodes if no other node is free earlier.
"""

MOST_DEPTH: Final = 64
"""Largest depth of a tree, in hops from its root."""

HOP_S: Final = 0.02
"""Assumed seconds that a piece travels between two nodes at home, without sending time."""


@dataclass(slots=True, eq=False)
class Tree:
    """Tree along which a piece is handed on. Nodes are numbers; sets of nodes are bit masks."""

    root: int
    children: dict[int, list[int]]
    parents: dict[int, int]
    covers: int
    """All nodes that the tree serves, that is all except its root, as a bit mask."""
    takes_s: float = 0.0
    """Planned seconds until all nodes have a piece that the root has; 0 = not planned (a star)."""
    kids: dict[int, int] = field(default_factory=dict)
    """Bit mask of each node's children, with the same content as `children`."""
    _packed: bytes | None = None

    def below(self, number: int) -> int:
        """Return all descendants of the node, as a bit mask."""
        found = self.kids.get(number, 0)
        for child in self.children.get(number, ()):
            found |= self.below(child) if child in self.children else 0
        return found

    def packed(self, wanting: int) -> bytes:
        """Return the instructions with which the root serves the nodes in the bit mask `wanting`, in the format of
        `echo_shared.wire.relay_tree`."""
        if wanting & self.covers != self.covers:
            return self._pack(wanting)
        if self._packed is None:
            self._packed = relay_tree.pack_all(self.root, self.children)
        return self._packed

    def _pack(self, wanting: int) -> bytes:
        packed: dict[int, list[tuple[int, int, bytes]]] = {}
        for number, parent in reversed(self.parents.items()):  # Descendants were inserted after their ancestors.
            branches = packed.pop(number, ())
            if branches or wanting >> number & 1:
                packed.setdefault(parent, []).append((number, len(branches), relay_tree.pack(reversed(branches))))
        return relay_tree.pack(reversed(packed.get(self.root, [])))


def star(root: int, mask: int) -> Tree:
    numbers = list(bits(mask))
    return Tree(root, {root: numbers}, dict.fromkeys(numbers, root), mask, kids={root: mask})


def bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        mask ^= bit
        yield bit.bit_length() - 1


def grow(
    root: int,
    links: Mapping[int, Sequence[int]],
    *,
    wanting: Collection[int],
    free_at: Mapping[int, float],
    copy_s: Mapping[int, float],
) -> Tree:
    """Grow a tree from `root` that serves the `wanting` nodes as early as possible, by greedy choice. `free_at`:
    seconds until a node has sent all earlier copies; `copy_s`: seconds that it needs to send one copy of a piece."""
    left = set(wanting)
    left.discard(root)
    busy_until = {**dict.fromkeys(left, inf), **free_at}
    soonest = busy_until.__getitem__
    children: dict[int, list[int]] = {}
    parents: dict[int, int] = {}
    depths = {root: 0}
    waiting = [(free_at[root], root)]
    last_at = 0.0
    while waiting and left:
        at, node = heappop(waiting)
        if busy_until[node] > at:
            heappush(waiting, (busy_until[node], node))
            continue
        open_links = [one for one in links[node] if one in left]
        if not open_links:
            continue
        goes_on = len(open_links) > FAN_OUT
        if goes_on:
            open_links.sort(key=soonest)
            del open_links[FAN_OUT:]
        left.difference_update(open_links)
        ends_at = busy_until[node] = at + len(open_links) * copy_s[node]
        children.setdefault(node, []).extend(open_links)
        depth, there_at = depths[node] + 1, ends_at + HOP_S
        for child in open_links:
            parents[child], depths[child] = node, depth
            if child in free_at and depth < MOST_DEPTH:
                heappush(waiting, (there_at, child))
        if goes_on:
            heappush(waiting, (ends_at, node))
        last_at = max(last_at, there_at)
    kids = {node: _mask(numbers) for node, numbers in children.items()}
    covers = 0
    for mask in kids.values():
        covers |= mask
    return Tree(root, children, parents, covers, last_at, kids)


def _mask(numbers: Iterable[int]) -> int:
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask
