from __future__ import annotations

from random import Random

from echo_hub.core.nodes.version_tree import VersionTree


def test_an_empty_tree_has_nothing() -> None:
    tree = VersionTree()
    tree.discard(3)
    assert (tree.first(0), tree.count(0)) == (None, 0)


def test_a_version_without_a_place_still_counts() -> None:
    tree = VersionTree()
    tree.put(1, 4, None)
    tree.put(2, 1, (0.5, 0, "a"))
    tree.put(2, 2, None)
    assert (tree.first(0), tree.count(0), tree.count(2), tree.count(3)) == (None, 6, 2, 0)


def test_it_answers_as_a_plain_list_would_in_any_order_of_changes() -> None:
    chance, tree = Random(3), VersionTree()
    plain: dict[int, tuple[int, tuple[float, int, str] | None]] = {}
    for turn in range(5_000):
        # Versions in ascending order, as they are published, and others between them.
        version = turn // 25 if chance.random() < 0.5 else chance.randrange(200)
        if chance.random() < 0.45:
            tree.discard(version)
            plain.pop(version, None)
        else:
            value = (chance.randrange(5), (chance.random(), 0, "a") if chance.random() < 0.8 else None)
            tree.put(version, *value)
            plain[version] = value
        for oldest in (0, chance.randrange(200), 2**53):
            of_these = [value for its, value in plain.items() if its >= oldest]
            assert tree.count(oldest) == sum(count for count, _ in of_these)
            assert tree.first(oldest) == min((place for _, place in of_these if place is not None), default=None)
