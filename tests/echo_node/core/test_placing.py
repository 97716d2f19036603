"""Which engines get the rollouts of a lease. The expected numbers are computed by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.core.placing import Seats, place, rates


def seats(device: str, *, width: int = 8, window: float = 16, rate: float = 100.0, taken: int = 0) -> Seats:
    return Seats(device=device, width=width, window=window, rate=rate, taken=taken)


def placed(count: int, *engines: Seats) -> dict[str, int]:
    return {engine.device: number for engine, number in place(count, engines)}


def test_a_lease_stays_together_on_the_engine_that_ends_first() -> None:
    fast, slow = seats("fast"), seats("slow", rate=50.0)
    assert placed(6, slow, fast) == {"fast": 6}
    assert placed(6, slow, fast) == {"slow": 6}, "the fast engine could start only two of them at once"
    assert placed(4, slow, fast) == {"fast": 2, "slow": 2}
    assert (fast.taken, slow.taken) == (8, 8)


def test_a_lease_wider_than_the_engines_is_split_and_its_rest_waits_in_one_queue() -> None:
    fast, slow = seats("fast"), seats("slow", rate=50.0)
    assert placed(18, slow, fast) == {"fast": 10, "slow": 8}


def test_without_free_width_a_lease_waits_where_it_ends_first() -> None:
    fast, slow = seats("fast", taken=12), seats("slow", rate=50.0, taken=8)
    assert placed(3, slow, fast) == {"fast": 3}, "(12 + 3) / 100 < (8 + 3) / 50"
    assert placed(3, slow, fast) == {"slow": 3}, "the fast engine's window has only one place left"
    assert placed(9, slow, fast) == {}, "no window has room"


def test_rollouts_beyond_all_windows_wait() -> None:
    one, other = seats("one", window=8), seats("other", window=8)
    assert placed(40, one, other) == {"one": 8, "other": 8}
    assert placed(1, one, other) == {}


def test_an_engine_that_cannot_end_in_time_gets_less_than_its_width() -> None:
    assert placed(4, seats("slow", window=1, rate=1.0), seats("fast", taken=6)) == {"fast": 3, "slow": 1}


def test_a_sole_engine_takes_all() -> None:
    assert placed(1_000, seats("", window=math.inf)) == {"": 1_000}
    assert placed(3, seats("", window=math.inf, taken=1_000)) == {"": 3}


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([(10.0, 8), (20.0, 4)], [10.0, 20.0]),
        ([(0.0, 8), (20.0, 4)], [8.0, 4.0]),
        ([(0.0, 0)], [1.0]),
        ([], []),
    ],
)
def test_widths_are_compared_unless_all_speeds_are_known(
    speeds: list[tuple[float, int]], expected: list[float]
) -> None:
    assert rates(speeds) == expected


SEATS = st.builds(
    seats,
    st.sampled_from(("a", "b", "c")),
    width=st.integers(1, 9),
    window=st.one_of(st.integers(0, 20), st.just(math.inf)),
    rate=st.floats(0.1, 100),
    taken=st.integers(0, 25),
)


@given(st.lists(SEATS, max_size=3, unique_by=lambda one: one.device), st.integers(1, 30))
def test_no_window_is_exceeded_and_no_free_engine_idles(engines: list[Seats], count: int) -> None:
    before = {engine.device: engine.taken for engine in engines}
    found = placed(count, *engines)
    assert all(number > 0 for number in found.values()) and sum(found.values()) <= count
    for engine in engines:
        assert engine.taken == before[engine.device] + found.get(engine.device, 0)
        assert engine.taken <= max(engine.window, before[engine.device])
    waits = count - sum(found.values())
    assert not waits or all(engine.free == 0 for engine in engines), "a rollout waits, and an engine idles"
