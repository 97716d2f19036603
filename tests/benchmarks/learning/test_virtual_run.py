from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.learning import cases
from benchmarks.learning.cases import Case
from benchmarks.learning.virtual_run import Point, run

SMALL = {"steps": 20, "groups_per_step": 4, "group_size": 4, "problems": 16}


def small(case: Case) -> list[Point]:
    return run(replace(case, **SMALL), seed=1)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_staleness_is_what_the_case_says_and_every_case_trains_as_much() -> None:
    colocated = small(cases.COLOCATED)
    assert [point.trained_rollouts for point in colocated] == [0, 160, 320]
    assert small(cases.SEQUENTIAL) == colocated, "the same rollouts, the same version, the same gradient"
    for bound, case in cases.BY_STALENESS.items():
        points = small(case)
        assert [point.staleness for point in points] == [0, bound, bound]
        assert [point.trained_rollouts for point in points] == [0, 160, 320]
