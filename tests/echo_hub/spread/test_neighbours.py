from __future__ import annotations

import random
from statistics import fmean

import pytest

from echo_hub.spread.neighbours import Neighbours


def neighbours(degree: int, count: int, *, deaf: int = 0, seed: int = 1) -> tuple[Neighbours, list[str]]:
    made = Neighbours(degree=degree, draw=random.Random(seed).randrange)
    names = [f"n{number}" for number in range(count)]
    for number, name in enumerate(names):
        made.join(name, listens=number >= deaf)
    return made, names


def links(made: Neighbours, names: list[str]) -> set[frozenset[str]]:
    for name in names:
        assert name not in made.of(name)
        assert all(name in made.of(other) for other in made.of(name)), "a link has two ends"
    return {frozenset((name, other)) for name in names for other in made.of(name)}


def hops(made: Neighbours, start: str) -> dict[str, int]:
    found, edge = {start: 0}, {start}
    while edge:
        edge = {other for name in edge for other in made.of(name)} - found.keys()
        found |= dict.fromkeys(edge, max(found.values()) + 1)
    return found


@pytest.mark.parametrize("count", [1, 2, 9, 33])
def test_a_small_fleet_is_linked_fully(count: int) -> None:
    made, names = neighbours(32, count)
    assert len(links(made, names)) == count * (count - 1) / 2
    assert made.of("stranger") == set()


@pytest.mark.parametrize(("degree", "count"), [(4, 30), (16, 300), (32, 1_000)])
def test_a_large_fleet_is_linked_evenly_with_short_paths(degree: int, count: int) -> None:
    made, names = neighbours(degree, count)
    degrees = [len(made.of(name)) for name in names]
    assert max(degrees) <= degree and min(degrees) >= degree - 2
    links(made, names)
    far = hops(made, names[0])
    assert len(far) == count
    assert max(far.values()) <= (5 if degree == 4 else 3)


def test_joins_and_leaves_change_few_links_of_the_others() -> None:
    made, names = neighbours(16, 200)
    before = links(made, names)
    made.join("new", listens=True)
    with_it = links(made, [*names, "new"])
    assert len(made.of("new")) == 16 and len(before - with_it) <= 8
    made.leave("new")
    made.leave("new")
    after = links(made, names)
    assert len(before ^ after) <= 32
    assert fmean(len(made.of(name)) for name in names) > 15


def test_after_many_have_gone_the_rest_are_linked_as_well() -> None:
    made, names = neighbours(8, 200)
    rng = random.Random(3)
    for turn in range(400):
        gone = names.pop(rng.randrange(len(names)))
        made.leave(gone)
        if turn < 250:
            names.append(f"later{turn}")
            made.join(names[-1], listens=True)
    assert len(names) == 50
    links(made, names)
    assert len(hops(made, names[0])) == 50
    assert fmean(len(made.of(name)) for name in names) > 7
    for name in names[9:]:
        made.leave(name)
    assert len(links(made, names[:9])) >= 34, "a fleet that became small is linked nearly completely"


def test_two_that_cannot_be_connected_to_are_no_neighbours() -> None:
    made, names = neighbours(8, 60, deaf=30)
    for name in names[:30]:
        assert made.of(name) and not any(int(other[1:]) < 30 for other in made.of(name))
