from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.papers.cases import COLOCATED, SEQUENTIAL, smaller
from benchmarks.papers.runs import Found, carry_out_all, runs_of

SIZES = {"training": {"steps": 1, "groups_per_step": 1, "group_size": 2}, "evaluation": {"problems": 1}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_run_that_two_tables_name_is_carried_out_once() -> None:
    one, other = (replace(smaller(case, SIZES)) for case in (COLOCATED, SEQUENTIAL))
    told: dict[int, Found] = {}
    carry_out_all([([one], 2), ([one, other], 1)], 0, told.__setitem__)
    assert set(told) == {0, 1}
    assert told[0][one][0] is told[1][one][0], "the same run, not an equal one"
    assert set(told[1]) == {one, other} and len(told[0][one]) == 2 and len(told[1][one]) == 1


def test_runs_are_ordered_by_seed_and_untrained_cases_run_once() -> None:
    untrained = replace(COLOCATED, runner="untrained")
    assert runs_of(([COLOCATED, untrained, SEQUENTIAL], 2)) == [
        (COLOCATED, 0),
        (untrained, 0),
        (SEQUENTIAL, 0),
        (COLOCATED, 1),
        (SEQUENTIAL, 1),
    ]


def test_nothing_wanted_is_nothing_done() -> None:
    carry_out_all([], 0, lambda number, found: pytest.fail("no table"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_untrained_base_is_measured_once_for_all_seeds() -> None:
    untrained = replace(smaller(COLOCATED, SIZES), runner="untrained")
    told: dict[int, Found] = {}
    carry_out_all([([untrained], 3)], 0, told.__setitem__)
    assert len(told[0][untrained]) == 3 and len(set(map(id, told[0][untrained]))) == 1
