import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.core.clocks import SLEPT_S, WRONG_S, ClockReading, HubClock, SleepSense, in_words, slept
from echo_node.core.troubles import TroubleCode

TIMES = st.floats(min_value=0, max_value=1e9)
JUMPS = st.floats(min_value=-1e9, max_value=1e9)


def test_a_gap_between_two_clock_readings_is_a_sleep() -> None:
    sense = SleepSense(look_s=1.0)
    assert sense.slept_s(ClockReading(100.0, 0.0)) == 0.0, "there is nothing to compare with"
    assert sense.slept_s(ClockReading(101.0, 0.0)) == 0.0
    assert sense.slept_s(ClockReading(101.0 + 1.0 + SLEPT_S - 0.1, 0.0)) == 0.0, "the process was busy"
    before = 101.0 + 1.0 + SLEPT_S - 0.1
    assert sense.slept_s(ClockReading(before + 7_201.0, 0.0)) == 7_200.0
    assert sense.slept_s(ClockReading(before + 7_202.0, 0.0)) == 0.0, "a sleep is reported once"


@given(JUMPS)
def test_a_time_of_day_that_jumps_is_no_sleep(jump: float) -> None:
    sense = SleepSense(look_s=1.0)
    sense.slept_s(ClockReading(5.0, 1e9))
    assert sense.slept_s(ClockReading(6.0, 1e9 + jump)) == 0.0


@given(TIMES, TIMES, JUMPS, st.floats(min_value=0, max_value=1e7))
def test_the_hubs_clock_shows_the_local_clocks_error(running: float, hub_wall: float, off: float, later: float) -> None:
    clock = HubClock()
    assert clock.ahead_s(ClockReading(running, hub_wall + off)) == 0.0, "the hub has sent no time"
    clock.tell(hub_wall, running=running)
    for passed in (0.0, later):
        reading = ClockReading(running + passed, hub_wall + passed + off)
        assert math.isclose(clock.ahead_s(reading), off, rel_tol=1e-6, abs_tol=1e-5)
        right = ClockReading(running + passed, hub_wall + passed)
        assert clock.trouble(right) is None


@pytest.mark.parametrize(
    ("off", "says"),
    [(2_220.0, "37 min ahead of the hub's"), (-86_400.0, "24 h behind the hub's"), (WRONG_S, "2 min ahead")],
)
def test_a_wrong_clock_is_reported_with_advice(off: float, says: str) -> None:
    clock = HubClock()
    clock.tell(1_000_000.0, running=50.0)
    trouble = clock.trouble(ClockReading(60.0, 1_000_010.0 + off))
    assert trouble is not None and trouble.code is TroubleCode.CLOCK
    assert says in trouble.sentence and "Set the clock" in trouble.sentence
    assert clock.trouble(ClockReading(60.0, 1_000_010.0 + math.copysign(WRONG_S - 1, off))) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (113, "113 s"), (119.9, "2 min"), (6_800, "113 min"), (7_199, "2 h"), (172_000, "2 days")],
)
def test_lengths_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_a_sleep_in_words() -> None:
    assert slept(7_230.0).sentence == "This machine slept for 2 h; reconnecting."
