from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.spread.holdings import VERSIONS_REMEMBERED, Dissemination, Release, quantile
from echo_shared.wire.messages import Way


def release(version: int) -> Release:
    return Release(policy_version=version, adapter_bytes=100, payload_bytes=30, carrier="delta", way=Way.BROADCAST)


def announce(spread: Dissemination, version: int, *, now: float) -> None:
    spread.announced(release(version), num_pieces=10, now=now)


def joined(*node_ids: str, parents_back: int = 4) -> Dissemination:
    spread = Dissemination(parents_back=parents_back)
    for node_id in node_ids:
        spread.node_joined(node_id, 0)
    return spread


def test_seconds_count_from_the_announcement_for_nodes_that_got_it() -> None:
    spread = joined("a", "b")
    announce(spread, 1, now=10.0)
    spread.node_joined("late", 1)
    assert spread.fetched("a", 1, 10.5) == 0.5
    assert spread.fetched("a", 1, 11.0) is None, "a node repeats its report after each reconnect"
    assert spread.fetched("late", 1, 12.0) is None
    assert spread.fetched("never seen", 1, 12.0) is None
    assert spread.fetched("b", 7, 12.0) is None, "not announced since the start"
    progress = spread.progress(12.0)
    assert progress is not None
    assert progress.seconds == (0.5,)
    assert spread.num_holding(1) == 2


def test_the_progress_of_the_newest_version() -> None:
    spread = joined("a", "b", "c", "d")
    assert spread.progress(1.0) is None
    announce(spread, 1, now=10.0)
    spread.pieces_arrived("b", 1, 5)
    spread.pieces_arrived("c", 1, 99)
    spread.pieces_arrived("d", 1, 5)
    spread.pieces_arrived("a", 2, 5)
    spread.fetched("a", 1, 11.0)
    spread.node_left("d")
    progress = spread.progress(12.0)
    assert progress is not None
    assert (progress.num_told, progress.seconds, progress.since_s, progress.under_way) == (3, (1.0,), 2.0, True)
    assert progress.share_arrived == pytest.approx((1 + 0.5 + 1) / 3)
    spread.fetched("b", 1, 13.0)
    spread.fetched("c", 1, 12.5)
    progress = spread.progress(99.0)
    assert progress is not None
    assert (progress.seconds, progress.since_s, progress.under_way) == ((1.0, 2.5, 3.0), 3.0, False)
    assert progress.share_arrived == 1.0
    announce(spread, 2, now=100.0)
    progress = spread.progress(100.0)
    assert progress is not None
    assert (progress.release, progress.seconds, progress.num_told) == (release(2), (), 3)


def test_without_nodes_no_dissemination_is_in_progress() -> None:
    spread = joined()
    announce(spread, 1, now=1.0)
    progress = spread.progress(5.0)
    assert progress is not None
    assert (progress.since_s, progress.share_arrived, progress.under_way) == (0.0, 1.0, False)


def test_a_node_that_skips_a_version_is_not_awaited() -> None:
    spread = joined("a", "b")
    announce(spread, 1, now=1.0)
    announce(spread, 2, now=2.0)
    assert spread.fetched("a", 2, 3.0) == 1.0
    assert spread.fetched("a", 1, 4.0) is None
    assert spread.fetched("b", 1, 4.0) == 3.0


def test_the_parent_makes_the_fewest_bytes() -> None:
    spread = joined("a", "b", "c")
    assert spread.delta_parent(1, ()) is None
    assert spread.delta_parent(4, (1, 2, 3)) is None, "no node holds any of them"
    for version in (1, 2, 3):
        spread.fetched("a", version, 1.0)
    assert spread.delta_parent(4, (1, 2, 3)) == 3, "one node that can use the delta is better than none"
    for node_id in ("b", "c"):
        spread.fetched(node_id, 2, 1.0)
    assert spread.delta_parent(4, (1, 2, 3)) == 2, "two keyframes cost more than the larger delta"
    assert spread.delta_parent(4, (1, 3)) == 3, "a version that is no longer published is no parent"
    spread.fetched("b", 3, 1.0)
    spread.node_left("c")
    assert spread.delta_parent(4, (1, 2, 3)) == 3
    spread.lacks("b", 2)
    spread.lacks("nobody", 2)
    assert spread.delta_parent(3, (1, 2, 3)) == 2
    spread.node_left("a")
    spread.node_left("b")
    assert spread.delta_parent(4, (1, 2, 3)) is None


def test_one_node_without_a_parent_does_not_stop_deltas_for_others() -> None:
    spread = joined("a", "b", "c", "liar")
    for version in range(1, 6):
        for node_id in "abc":
            spread.fetched(node_id, version, 1.0)
    spread.fetched("liar", 2, 1.0)
    assert spread.delta_parent(6, range(1, 6)) == 5


def test_how_much_smaller_deltas_are_is_learnt() -> None:
    spread = joined("a", "b", "c")
    for node_id in "abc":
        spread.fetched(node_id, 1, 1.0)
    for node_id in "ab":
        spread.fetched(node_id, 2, 1.0)
    assert spread.delta_parent(3, (1, 2)) == 1
    announce(spread, 1, now=1.0)
    spread.announced(replace(release(2), carrier="keyframe", payload_bytes=33), num_pieces=10, now=2.0)
    assert spread.delta_parent(3, (1, 2)) == 2, "a third keyframe is little larger than a delta"


def test_a_parent_is_only_so_far_back() -> None:
    published = tuple(range(1, 9))
    spread = joined("a", parents_back=2)
    spread.fetched("a", 6, 1.0)
    assert spread.delta_parent(9, published) is None
    spread.fetched("a", 7, 1.0)
    assert spread.delta_parent(9, published) == 7
    never = joined("a", parents_back=0)
    never.fetched("a", 8, 1.0)
    assert never.delta_parent(9, published) is None


def test_a_reconnected_node_is_timed_from_the_announcement() -> None:
    spread = joined("a", "b")
    announce(spread, 1, now=10.0)
    spread.node_left("a")
    progress = spread.progress(11.0)
    assert progress is not None and progress.num_told == 1
    spread.node_joined("a", 1)
    assert spread.fetched("a", 1, 13.0) == 3.0
    spread.node_left("a")
    spread.node_joined("a", 1)
    assert spread.fetched("a", 1, 14.0) is None


def test_the_newest_version_that_all_have() -> None:
    spread = joined("a", "b")
    assert spread.newest_complete() is None
    announce(spread, 1, now=1.0)
    announce(spread, 2, now=2.0)
    spread.fetched("a", 1, 3.0)
    assert spread.newest_complete() is None
    spread.fetched("b", 2, 3.0)
    assert spread.newest_complete() == 1, "node b skipped version 1"
    spread.fetched("a", 2, 4.0)
    assert spread.newest_complete() == 2


def test_a_version_is_wanted_until_all_have_it_or_a_newer_one() -> None:
    spread = joined("a", "b")
    for version in (1, 2, 3):
        announce(spread, version, now=float(version))
    spread.fetched("a", 2, 3.0)
    spread.fetched("b", 1, 3.0)
    assert spread.wanted() == {2, 3}, "node b may still be at version 2"
    spread.node_joined("late", 3)
    spread.fetched("b", 3, 4.0)
    spread.fetched("a", 3, 4.0)
    assert spread.wanted() == {3}, "the node that came late is at version 3"
    spread.node_left("late")
    assert spread.wanted() == frozenset()


def test_versions_that_are_no_longer_published_are_not_wanted() -> None:
    spread = joined("never fetches")
    for version in range(1, 100):
        announce(spread, version, now=1.0)
        spread.keep(range(version - 8, version + 1))
    assert spread.wanted() == set(range(91, 100))


def test_only_the_newest_are_remembered() -> None:
    spread = joined("a")
    for version in range(1, VERSIONS_REMEMBERED + 3):
        announce(spread, version, now=float(version))
    for version in range(VERSIONS_REMEMBERED + 2, 0, -1):
        spread.fetched("a", version, 99.0)
    assert spread.num_holding(2) == 0
    assert spread.num_holding(3) == 1
    assert spread.fetched("a", 1, 100.0) is None


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.51, 3.0), (0.75, 3.0), (0.95, 4.0), (1.0, 4.0)]
)
def test_quantiles_by_nearest_rank(share: float, expected: float) -> None:
    assert quantile((1.0, 2.0, 3.0, 4.0), share) == expected
    assert quantile((), share) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["join", "leave", "fetch"]), st.integers(1, 6))))
def test_no_newer_parent_is_held_by_as_many_nodes_after_any_events(events: list[tuple[str, str, int]]) -> None:
    spread, held = Dissemination(parents_back=3), dict[str, set[int]]()
    for now, (node_id, event, version) in enumerate(events):
        if event == "join":
            spread.node_joined(node_id, version)
            held[node_id] = set()
        elif event == "leave":
            spread.node_left(node_id)
            held.pop(node_id, None)
        else:
            spread.fetched(node_id, version, float(now))
            held.get(node_id, set()).add(version)
    holding = {version: sum(version in of_node for of_node in held.values()) for version in (4, 5, 6)}
    parent = spread.delta_parent(7, range(1, 7))
    if parent is None:
        assert not any(holding.values())
    else:
        assert all(holding[newer] < holding[parent] for newer in holding if newer > parent)
