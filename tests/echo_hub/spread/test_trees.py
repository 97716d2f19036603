from __future__ import annotations

import random

import pytest

from echo_hub.spread.neighbours import Neighbours
from echo_hub.spread.trees import FAN_OUT, HOP_S, MOST_DEPTH, Tree, bits, grow, star
from echo_shared.wire.relay_tree import NODE_BYTES, split


def grown(
    root: int, links: dict[int, list[int]], *, free_at: dict[int, float], copy_s: float | dict[int, float] = 0.1
) -> Tree:
    each_s = dict.fromkeys(free_at, copy_s) if isinstance(copy_s, float) else copy_s
    return grow(root, links, wanting=links, free_at=free_at, copy_s=each_s)


def random_links(count: int, degree: int = 32) -> dict[int, list[int]]:
    made = Neighbours(degree=degree, draw=random.Random(5).randrange)
    for number in range(count):
        made.join(str(number), listens=True)
    return {number: sorted(int(other) for other in made.of(str(number))) for number in range(count)}


def depth(tree: Tree, number: int) -> int:
    return 0 if number == tree.root else 1 + depth(tree, tree.parents[number])


def as_packed(tree: Tree, way: bytes, number: int) -> dict[int, int]:
    """Return each node's parent, as the nodes read it from the encoded tree."""
    found: dict[int, int] = {}
    for child, below in split(way):
        found |= {child: number} | as_packed(tree, below, child)
    return found


def test_the_example_at_the_modules_top() -> None:
    ring = {0: [1, 3], 1: [0, 2], 2: [1, 3], 3: [2, 0]}
    idle = grown(0, ring, free_at=dict.fromkeys(ring, 0.0))
    assert idle.children[0] == [1, 3] and idle.parents[2] in (1, 3)
    assert idle.takes_s == pytest.approx(3 * 0.1 + 2 * HOP_S)
    busy = grown(1, ring, free_at={0: 0.4, 1: 0.0, 2: 0.0, 3: 0.0})
    assert 0 not in busy.children and sorted(busy.parents) == [0, 2, 3]


def test_all_are_covered_each_over_a_link_and_in_few_hops() -> None:
    links = random_links(500)
    tree = grown(7, links, free_at=dict.fromkeys(links, 0.0))
    assert sorted(tree.parents) == [number for number in links if number != 7]
    assert set(bits(tree.covers)) == set(tree.parents)
    assert all(child in links[parent] for child, parent in tree.parents.items())
    assert max(depth(tree, number) for number in links) <= 8
    assert tree.takes_s < 2.0
    assert tree.below(7) == tree.covers


def test_copies_are_proportional_to_uplink_rates_over_many_trees() -> None:
    links = random_links(100)
    copy_s = {number: 0.1 if number % 2 else 0.4 for number in links}
    copies, waiting = dict.fromkeys(links, 0), dict.fromkeys(links, 0.0)
    for _ in range(64):
        free_at = {number: waiting[number] * copy_s[number] for number in links}
        root = min(free_at, key=lambda one: (free_at[one], one))
        for number, children in grown(root, links, free_at=free_at, copy_s=copy_s).children.items():
            copies[number] += len(children)
            waiting[number] += len(children)
        # One tree needs 99 copies, which takes 0.16 s: all uplinks together send 625 copies per second.
        waiting = {number: max(0.0, count - 0.16 / copy_s[number]) for number, count in waiting.items()}
    fast, slow = (sum(copies[number] for number in links if number % 2 == odd) for odd in (1, 0))
    assert 3 < fast / slow < 5
    assert max(waiting[number] * copy_s[number] for number in links) < 2.0, "no node falls behind"


def test_non_relaying_nodes_are_leaves_and_unreachable_ones_are_left_out() -> None:
    links = random_links(40, degree=6) | {40: []}
    able = {number: 0.0 for number in links if number % 3}
    tree = grown(1, links, free_at=able)
    assert all(number % 3 for number in tree.children)
    assert sorted(tree.parents) == [number for number in range(40) if number != 1]
    assert not tree.covers >> 40 & 1


def test_a_chain_ends_at_some_depth() -> None:
    chain = {number: [one for one in (number - 1, number + 1) if 0 <= one < 200] for number in range(200)}
    tree = grown(0, chain, free_at=dict.fromkeys(chain, 0.0))
    assert len(tree.parents) == MOST_DEPTH
    assert tree.below(60).bit_count() == MOST_DEPTH - 60


def test_the_packed_tree_has_the_nodes_that_want_the_piece() -> None:
    links = random_links(60, degree=8)
    tree = grown(3, links, free_at=dict.fromkeys(links, 0.0))
    way = tree.packed(tree.covers)
    assert as_packed(tree, way, 3) == tree.parents
    assert len(way) == NODE_BYTES * 59
    assert tree.packed(-1) is way, "packed once"
    far = max(tree.parents, key=lambda number: depth(tree, number))
    only = as_packed(tree, tree.packed(1 << far), 3)
    assert len(only) == depth(tree, far) and only.items() <= tree.parents.items()


def test_a_star() -> None:
    tree = star(4, 0b1001)
    assert split(tree.packed(0b1001)) == [(0, b""), (3, b"")]
    assert (tree.below(4), tree.below(0)) == (0b1001, 0)
    assert FAN_OUT > 1
