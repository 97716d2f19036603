from __future__ import annotations

import pytest

from echo_hub.core.nodes.pace import RAMP, UNBOUNDED, NodePace


def worked(
    pace: NodePace,
    *,
    rounds: int,
    at_once: int,
    seconds: float,
    way_s: float = 0.0,
    start: float = 0.0,
    held: int | None = None,
) -> float:
    """Simulate rounds of completions of 100 tokens on a node that samples `at_once` of them at a time; return the time
    at the end.
    """
    now = start
    pace.begin(now)
    for _ in range(rounds):
        now += seconds + way_s
        for _ in range(at_once):
            pace.arrived(100, sampling_s=seconds, latency_s=seconds + way_s, held=held or at_once, now=now)
    return now


def test_a_node_that_draws_eight_at_once() -> None:
    pace = NodePace()
    worked(pace, rounds=20, at_once=8, seconds=5.0)
    assert (pace.token_s, pace.tokens_per_s) == pytest.approx((0.05, 160.0), rel=0.15)
    assert 11 <= pace.takes <= 15, "eight, what it samples in 0.4 s, and a quarter more"


def test_rollouts_in_transit_count_as_held() -> None:
    near, far = NodePace(), NodePace()
    worked(near, rounds=60, at_once=8, seconds=10.0)
    worked(far, rounds=60, at_once=8, seconds=10.0, way_s=10.0)
    assert far.takes == pytest.approx(near.takes, abs=2), "four are sampled while four are in transit"


def test_a_nodes_reported_pace_is_capped_by_the_measured_one() -> None:
    pace = NodePace()
    pace.begin(0.0)
    pace.arrived(100, sampling_s=500.0, latency_s=2.0, held=1, now=2.0)
    assert pace.token_s == pytest.approx(0.02)


def test_with_little_to_do_a_node_is_not_taken_for_slow() -> None:
    pace = NodePace()
    now = worked(pace, rounds=20, at_once=8, seconds=4.0)
    busy = pace.tokens_per_s
    worked(pace, rounds=30, at_once=1, seconds=4.0, start=now)
    assert pace.tokens_per_s > 0.9 * busy
    now = worked(pace, rounds=3_000, at_once=1, seconds=4.0, start=now)
    assert 0.6 * busy < pace.tokens_per_s < 0.75 * busy, "old peaks are forgotten"


def test_a_node_that_samples_fewer_rollouts_than_it_holds_gets_slower() -> None:
    pace = NodePace()
    now = worked(pace, rounds=20, at_once=8, seconds=4.0)
    worked(pace, rounds=300, at_once=2, held=10, seconds=4.0, start=now)
    assert pace.tokens_per_s == pytest.approx(50.0, rel=0.3)


def test_a_node_with_slower_tokens_is_slower_at_once_at_any_load() -> None:
    pace = NodePace()
    now = worked(pace, rounds=20, at_once=8, seconds=4.0)
    busy = pace.tokens_per_s
    worked(pace, rounds=60, at_once=1, seconds=12.0, start=now)
    assert pace.tokens_per_s == pytest.approx(busy / 3.0, rel=0.2)


def test_when_something_is_back() -> None:
    pace = NodePace()
    worked(pace, rounds=40, at_once=4, seconds=5.0)
    assert pace.finish_s(0.0, 100.0) == pytest.approx(5.0)
    assert pace.finish_s(300.0, 100.0) == pytest.approx(5.0), "it samples four at once"
    assert pace.finish_s(400.0, 100.0) == pytest.approx(10.0), "the fifth waits for one of these"
    assert pace.finish_s(0.0, 300.0) == pytest.approx(15.0)


def test_the_number_of_rollouts_that_fit_a_deadline() -> None:
    pace = NodePace()
    worked(pace, rounds=40, at_once=4, seconds=5.0)
    assert [pace.fits(0.0, 100.0, in_s) for in_s in (4.0, 6.0, 9.0, 11.0)] == [0, 4, 4, 8]
    assert pace.fits(300.0, 100.0, 6.0) == 1
    assert pace.fits(400.0, 100.0, 6.0) == 0


def test_nothing_is_known_of_a_node_that_returned_nothing() -> None:
    pace = NodePace()
    assert (pace.token_s, pace.tokens_per_s, pace.takes) == (0.0, 0.0, 0)
    assert (pace.finish_s(9.0, 9.0), pace.fits(9.0, 9.0, 1.0)) == (0.0, UNBOUNDED)


def test_a_clock_that_stands_still_harms_nothing() -> None:
    pace = NodePace()
    pace.begin(7.0)
    for _ in range(3):
        pace.arrived(0, sampling_s=0.0, latency_s=0.0, held=1, now=7.0)
        pace.arrived(5, sampling_s=0.1, latency_s=-1.0, held=1, now=7.0)
    assert pace.tokens_per_s == 0.0


def test_an_overdue_answer_limits_the_estimated_pace() -> None:
    """Overdue rollouts set an upper limit on a node's estimated speed, whether the node has returned results or not."""
    unknown, fast = NodePace(), NodePace()
    worked(fast, rounds=20, at_once=1, seconds=1.0)
    for pace in (unknown, fast):
        pace.missed(100.0, 10.0)
        assert pace.token_s == pytest.approx(0.2), "it counts as half sampled"
        pace.missed(100.0, 2.0)
        assert pace.token_s == pytest.approx(0.2)
        assert pace.fits(0.0, 100.0, 10.0) == 0 < pace.fits(0.0, 100.0, 21.0)
    worked(fast, rounds=1, at_once=1, seconds=1.0, start=40.0)
    assert fast.token_s == pytest.approx(0.01), "results that arrive outweigh the estimate"


def test_a_node_that_keeps_its_promise_is_trusted_with_more() -> None:
    """Both nodes sample 8 rollouts in parallel, in 5 s each. One of them has claimed the speed of 256 parallel
    rollouts."""
    claims, claims_nothing = NodePace(), NodePace()
    claims.promise(256 * 20.0, 512)
    for pace in (claims, claims_nothing):
        worked(pace, rounds=2, at_once=8, seconds=5.0)
    assert claims.takes - 1 == pytest.approx(RAMP * (claims_nothing.takes - 1), abs=RAMP)
    assert claims.fits(0.0, 100.0, 6.0) > 4 * 8 > claims_nothing.fits(0.0, 100.0, 6.0) >= 8
    assert claims.tokens_per_s == claims_nothing.tokens_per_s, "the measured speed is not changed"
    claims.promise(9 * 20.0, 18)
    worked(claims, rounds=2, at_once=8, seconds=5.0, start=10.0)
    assert claims.takes < 2 * claims_nothing.takes, "it is expected to reach its claim and no more"


def test_a_broken_promise_counts_as_none_until_the_next_connection() -> None:
    pace = NodePace()
    pace.promise(1_000.0, 10)
    worked(pace, rounds=1, at_once=1, seconds=2.0)
    pace.promise(1_000.0, 10)
    assert pace.promised_per_s == 0.0
    pace.connect()
    pace.promise(1_000.0, 0)
    assert pace.promised_per_s == 0.0, "a node without capacity promises nothing"
    pace.promise(1_000.0, 10)
    assert pace.promised_per_s == 1_000.0
