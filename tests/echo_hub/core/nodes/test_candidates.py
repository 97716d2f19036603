from __future__ import annotations

from random import Random

import pytest

from echo_hub.core.nodes.candidates import Candidates


def test_the_best_place_is_of_the_asked_versions() -> None:
    candidates = Candidates()
    candidates.put("a", 7, (0.5, 12, "a"))
    candidates.put("b", 7, None)
    candidates.put("c", 9, (0.75, 11, "c"))
    assert [candidates.first(version) for version in (0, 7, 8, 10)] == [
        (0.5, 12, "a"),
        (0.5, 12, "a"),
        (0.75, 11, "c"),
        None,
    ]
    assert [candidates.count(version) for version in (0, 7, 8, 10)] == [3, 3, 1, 0]
    assert (candidates.version("b"), candidates.version("d")) == (7, None)


def test_who_is_passed_over_still_counts_and_has_its_place_again_once_it_is_put() -> None:
    candidates = Candidates()
    for node_id in "ab":
        candidates.put(node_id, 1, (0.0, 0, node_id))
    candidates.pass_over("a")
    assert (candidates.first(1), candidates.count(1)) == ((0.0, 0, "b"), 2)
    candidates.put("a", 1, (0.0, 0, "a"))
    assert candidates.first(1) == (0.0, 0, "a")
    with pytest.raises(KeyError):
        candidates.pass_over("stranger")


@pytest.mark.parametrize("num_versions", [1, 3, 50])
def test_it_answers_as_a_plain_list_would_whatever_came_before(num_versions: int) -> None:
    chance, candidates = Random(num_versions), Candidates()
    plain: dict[str, tuple[int, tuple[float, int, str] | None]] = {}
    for turn in range(4_000):
        node_id, version = f"n{chance.randrange(25)}", chance.randrange(num_versions)
        if turn % 400 > 300 or chance.random() < 0.2:
            candidates.discard(node_id)
            plain.pop(node_id, None)
        else:
            place = (chance.randrange(4) / 4, chance.randrange(3), node_id) if chance.random() < 0.7 else None
            candidates.put(node_id, version, place)
            plain[node_id] = (version, place)
        oldest = chance.randrange(num_versions + 1)
        able = [(its, place) for its, place in plain.values() if its >= oldest]
        assert candidates.first(oldest) == min((place for _, place in able if place is not None), default=None)
        assert candidates.count(oldest) == len(able)
        assert candidates.num_places <= 2 * len(plain)
