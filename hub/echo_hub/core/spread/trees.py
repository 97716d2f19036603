"""Trees over the links between nodes, by which a piece comes from the first of them to all others.

A ring of a, b, c, d, whose uplinks are equal, and idle:

    a → b, d      both have it when a has sent two copies
    b → c         the sooner one in line has one left to serve

If a were busy with another piece for as long as four copies take, a tree of b's would leave everything to b, c and d.
So each uplink carries copies in proportion to what it can, over all pieces together, and a node waits for few others. A
copy counts as there when all are that its node sends at once: they share its uplink.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Final

from echo_shared import relay_tree

MOST_IN_A_STAR: Final = 12
"""Nodes: in a larger fleet too many copies would leave one node before the last has its own."""

FAN_OUT: Final = 3
"""Copies that a node sends at once: more take it longer, fewer make the tree deeper; depth times fan-out, which is
FAN_OUT / log FAN_OUT for many nodes, is least here. It goes on with others where it still is the soonest."""

MOST_DEPTH: Final = 64
"""Nobody hands on what has come to it over so many others."""

HOP_S: Final = 0.02
"""From one home to another."""


@dataclass(slots=True, eq=False)
class Tree:
    """Nodes by number; sets of them are bit masks."""

    root: int
    children: dict[int, list[int]]
    parents: dict[int, int]
    covers: int
    """All but the root."""
    takes_s: float = 0.0
    """From the root until all have a piece, as planned."""
    kids: dict[int, int] = field(default_factory=dict)
    """`children`, as masks."""
    _packed: bytes | None = None

    def below(self, number: int) -> int:
        """All that get it through this node."""
        found = self.kids.get(number, 0)
        for child in self.children.get(number, ()):
            found |= self.below(child) if child in self.children else 0
        return found

    def packed(self, wanting: int) -> bytes:
        """What the root is told: who hands on to whom, so that these get it."""
        if wanting & self.covers != self.covers:
            return self._pack(wanting)
        if self._packed is None:
            self._packed = relay_tree.pack_all(self.root, self.children)
        return self._packed

    def _pack(self, wanting: int) -> bytes:
        packed: dict[int, list[tuple[int, int, bytes]]] = {}
        for number, parent in reversed(self.parents.items()):  # Who is below a node came into the tree after it.
            branches = packed.pop(number, ())
            if branches or wanting >> number & 1:
                packed.setdefault(parent, []).append((number, len(branches), relay_tree.pack(reversed(branches))))
        return relay_tree.pack(reversed(packed.get(self.root, [])))


def star(root: int, mask: int) -> Tree:
    """The root hands on to all others."""
    numbers = list(bits(mask))
    return Tree(root, {root: numbers}, dict.fromkeys(numbers, root), mask, kids={root: mask})


def bits(mask: int) -> Iterator[int]:
    """The numbers in a set."""
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
    """The tree from `root` by which those that want a piece have it soonest, one after the other as far as known.

    `links`: by number, whom each is linked with. `free_at`: when each uplink has sent what it has to, in seconds; those
    that are not in it hand nothing on. `copy_s`: what it takes each of these to send a copy.
    """
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
