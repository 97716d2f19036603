from __future__ import annotations

from echo_hub.store.streaks import current, day_of, longer


def test_days_are_utc_days() -> None:
    assert (day_of(0.0), day_of(86_399.9), day_of(86_400.0)) == (0, 0, 1)


def test_a_streak_grows_daily_and_restarts_after_a_gap() -> None:
    assert longer(0, None, 10) == 1
    assert longer(1, 10, 10) == 1
    assert longer(1, 10, 11) == 2
    assert longer(7, 11, 13) == 1


def test_a_clock_that_was_set_back_ends_no_streak() -> None:
    assert longer(5, 11, 9) == 5


def test_a_streak_ends_with_the_first_whole_day_without() -> None:
    assert current(5, 11, 11) == current(5, 11, 12) == 5
    assert current(5, 11, 13) == current(0, None, 13) == 0
