from __future__ import annotations

from echo_hub.views.pages_source import WINDOW_S, Rate


def test_the_rate_covers_the_last_window() -> None:
    rate = Rate(0.0)
    assert rate.per_s(0, 0.0) == 0.0, "no time has passed"
    assert rate.per_s(20, 10.0) == 2.0
    assert rate.per_s(20, WINDOW_S + 10.0) == 0.0, "nothing since the look a window ago"
    assert rate.per_s(30, WINDOW_S + 20.0) == 1.0, "older looks are forgotten"


def test_a_look_after_a_long_time_counts_all_of_it() -> None:
    assert Rate(0.0).per_s(1_000, 10 * WINDOW_S) == 1_000 / (10 * WINDOW_S)


def test_looks_of_every_second_see_the_same_rate() -> None:
    rate = Rate(0.0)
    for second in range(10_000):
        rate.per_s(second, float(second))
    assert abs(rate.per_s(10_000, 10_000.0) - 1.0) < 1e-9
