from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.papers import runs
from benchmarks.papers.cases import COLOCATED, SEQUENTIAL, smaller
from benchmarks.papers.runs import Found, carry_out_all

SIZES = {"training": {"steps": 1, "groups_per_step": 1, "group_size": 2}, "evaluation": {"problems": 1}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_run_that_two_tables_name_is_carried_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SEEDS", 1)
    one, other = (replace(smaller(case, SIZES)) for case in (COLOCATED, SEQUENTIAL))
    told: dict[int, Found] = {}
    carry_out_all([[one], [one, other]], 0, told.__setitem__)
    assert set(told) == {0, 1}
    assert told[0][one][0] is told[1][one][0], "the same run, not an equal one"
    assert set(told[1]) == {one, other}


def test_nothing_wanted_is_nothing_done() -> None:
    carry_out_all([], 0, lambda number, found: pytest.fail("no table"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_base_as_it_is_is_measured_once_for_all_seeds() -> None:
    untrained = replace(smaller(COLOCATED, SIZES), runner="untrained")
    told: dict[int, Found] = {}
    carry_out_all([[untrained]], 0, told.__setitem__)
    assert len(told[0][untrained]) == runs.SEEDS and len(set(map(id, told[0][untrained]))) == 1
