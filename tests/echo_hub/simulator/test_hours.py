"""Hours count from the start of the run; the last one may be incomplete."""

from __future__ import annotations

import pytest

from echo_hub.simulator.hours import Hours
from echo_shared.wire.messages import DropReason


def test_hour_by_hour() -> None:
    hours = Hours()
    hours.connect(1, 0.0)
    hours.connect(1, 1800.0)
    hours.connect(-2, 5400.0)
    hours.lease(3, 10.0)
    hours.lease(4, 3600.0)
    hours.drop(DropReason.STALE, 2, 7300.0)
    first, second, third = hours.figures([(0.0, 1800.0), (3000.0, 4200.0), (7200.0, 9000.0)], 9000.0)
    assert [hour.nodes for hour in (first, second, third)] == pytest.approx([1.5, 1.0, 0.0])
    assert [hour.utilisation for hour in (first, second, third)] == pytest.approx([2400 / 3600, 600 / 3600, 1.0])
    assert [hour.leased for hour in (first, second, third)] == [3, 4, 0]
    assert (first.dropped, third.dropped) == ({}, {"stale": 2})


def test_a_step_in_progress_counts_to_the_end_of_the_run() -> None:
    assert Hours().figures([(0.0, 50.0)], 10.0)[0].utilisation == 1.0
    assert Hours().figures([], 0.0) == ()
