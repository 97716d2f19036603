from __future__ import annotations

import pytest

from echo_hub.core.nodes.pace import UNBOUNDED, Pace


def worked(
    pace: Pace,
    *,
    rounds: int,
    at_once: int,
    seconds: float,
    way_s: float = 0.0,
    start: float = 0.0,
    held: int | None = None,
) -> float:
    """Rounds of completions of 100 tokens, `at_once` of those `held` at a time; the time afterwards."""
    now = start
    pace.begin(now)
    for _ in range(rounds):
        now += seconds + way_s
        for _ in range(at_once):
            pace.arrived(100, sampling_s=seconds, latency_s=seconds + way_s, held=held or at_once, now=now)
    return now


def test_a_node_that_draws_eight_at_once() -> None:
    pace = Pace()
    worked(pace, rounds=20, at_once=8, seconds=5.0)
    assert (pace.token_s, pace.tokens_per_s) == pytest.approx((0.05, 160.0), rel=0.15)
    assert 11 <= pace.takes <= 15, "eight, what it draws in .4 s, and a quarter more"


def test_what_is_on_its_way_counts() -> None:
    near, far = Pace(), Pace()
    worked(near, rounds=60, at_once=8, seconds=10.0)
    worked(far, rounds=60, at_once=8, seconds=10.0, way_s=10.0)
    assert far.takes == pytest.approx(near.takes, abs=2), "four draw while four travel"


def test_what_a_node_says_counts_for_no_more_than_what_was_seen() -> None:
    pace = Pace()
    pace.begin(0.0)
    pace.arrived(100, sampling_s=500.0, latency_s=2.0, held=1, now=2.0)
    assert pace.token_s == pytest.approx(0.02)


def test_with_little_to_do_a_node_is_not_taken_for_slow() -> None:
    pace = Pace()
    now = worked(pace, rounds=20, at_once=8, seconds=4.0)
    busy = pace.tokens_per_s
    worked(pace, rounds=30, at_once=1, seconds=4.0, start=now)
    assert pace.tokens_per_s > 0.9 * busy
    now = worked(pace, rounds=3_000, at_once=1, seconds=4.0, start=now)
    assert 0.6 * busy < pace.tokens_per_s < 0.75 * busy, "for ever it is not remembered"


def test_a_node_that_draws_less_than_it_holds_is_slower_than_it_was() -> None:
    pace = Pace()
    now = worked(pace, rounds=20, at_once=8, seconds=4.0)
    worked(pace, rounds=300, at_once=2, held=10, seconds=4.0, start=now)
    assert pace.tokens_per_s == pytest.approx(50.0, rel=0.3)


def test_a_node_whose_tokens_take_longer_is_known_to_be_slower_at_once_whatever_it_has_to_do() -> None:
    pace = Pace()
    now = worked(pace, rounds=20, at_once=8, seconds=4.0)
    busy = pace.tokens_per_s
    worked(pace, rounds=60, at_once=1, seconds=12.0, start=now)
    assert pace.tokens_per_s == pytest.approx(busy / 3.0, rel=0.2)


def test_when_something_is_back() -> None:
    pace = Pace()
    worked(pace, rounds=40, at_once=4, seconds=5.0)
    assert pace.finish_s(0.0, 100.0) == pytest.approx(5.0)
    assert pace.finish_s(300.0, 100.0) == pytest.approx(5.0), "it draws four at once"
    assert pace.finish_s(400.0, 100.0) == pytest.approx(10.0), "the fifth waits for one of these"
    assert pace.finish_s(0.0, 300.0) == pytest.approx(15.0)


def test_what_is_back_in_time() -> None:
    pace = Pace()
    worked(pace, rounds=40, at_once=4, seconds=5.0)
    assert [pace.fits(0.0, 100.0, in_s) for in_s in (4.0, 6.0, 9.0, 11.0)] == [0, 4, 4, 8]
    assert pace.fits(300.0, 100.0, 6.0) == 1
    assert pace.fits(400.0, 100.0, 6.0) == 0


def test_nothing_is_known_of_a_node_that_returned_nothing() -> None:
    pace = Pace()
    assert (pace.token_s, pace.tokens_per_s, pace.takes) == (0.0, 0.0, 0)
    assert (pace.finish_s(9.0, 9.0), pace.fits(9.0, 9.0, 1.0)) == (0.0, UNBOUNDED)


def test_a_clock_that_stands_still_harms_nothing() -> None:
    pace = Pace()
    pace.begin(7.0)
    for _ in range(3):
        pace.arrived(0, sampling_s=0.0, latency_s=0.0, held=1, now=7.0)
        pace.arrived(5, sampling_s=0.1, latency_s=-1.0, held=1, now=7.0)
    assert pace.tokens_per_s == 0.0


def test_who_has_not_answered_yet_is_at_most_as_fast_as_that() -> None:
    """A node that has returned nothing, and one that has been fast so far."""
    unknown, fast = Pace(), Pace()
    worked(fast, rounds=20, at_once=1, seconds=1.0)
    for pace in (unknown, fast):
        pace.missed(100.0, 10.0)
        assert pace.token_s == pytest.approx(0.2), "it counts as half drawn"
        pace.missed(100.0, 2.0)
        assert pace.token_s == pytest.approx(0.2)
        assert pace.fits(0.0, 100.0, 10.0) == 0 < pace.fits(0.0, 100.0, 21.0)
    worked(fast, rounds=1, at_once=1, seconds=1.0, start=40.0)
    assert fast.token_s == pytest.approx(0.01), "what comes in is what counts"
