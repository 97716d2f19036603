from __future__ import annotations

import pytest

from echo_node.core.time_left import LEAST_S, WINDOW_S, TimeLeft


def test_a_steady_job_is_foreseen_after_two_seconds() -> None:
    left = TimeLeft()
    assert left.note({"base": (0, 1_000)}, 0.0) == {}
    assert left.note({"base": (10, 1_000)}, LEAST_S / 2) == {}
    assert left.note({"base": (20, 1_000)}, LEAST_S) == {"base": pytest.approx(98.0)}


def test_only_the_last_seconds_count() -> None:
    left = TimeLeft()
    for second in range(100):
        left.note({"base": (second, 1_000)}, float(second))
    for second in range(100, 100 + int(WINDOW_S) + 1):
        found = left.note({"base": (99 + 10 * (second - 99), 1_000)}, float(second))
    assert found["base"] == pytest.approx((1_000 - 309) / 10, rel=0.03)


def test_a_job_that_stands_still_or_starts_again_is_not_foreseen() -> None:
    left = TimeLeft()
    for second in range(60):
        found = left.note({"base": (500, 1_000), "other": (10 * second, 600)}, float(second))
    assert found.keys() == {"other"}
    assert left.note({"other": (0, 600)}, 60.0) == {}
    assert left.note({}, 61.0) == left.note({"other": (10, 600)}, 62.0) == {}


def test_a_finished_job_has_nothing_left() -> None:
    left = TimeLeft()
    left.note({"base": (0, 10)}, 0.0)
    assert left.note({"base": (12, 10)}, 5.0) == {"base": 0.0}
