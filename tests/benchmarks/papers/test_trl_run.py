from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.papers.cases import COLOCATED
from benchmarks.papers.runs import carry_out
from benchmarks.papers.tables import TRL, TRL_SAME_DRAWS
from tests.benchmarks.papers.toy import smaller

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_it_trains_on_the_runs_problems_and_is_evaluated_as_the_run_is() -> None:
    pytest.importorskip("trl")
    run = carry_out(smaller(TRL, steps=2), 1)
    assert [point.trained_rollouts for point in run.points] == [0, 4, 8]
    assert len(run.steps) == 2 and all(0 <= step["mean_reward"] <= 1 for step in run.steps)


def test_with_the_same_draws_it_takes_the_hubs_own_steps() -> None:
    pytest.importorskip("trl")
    sizes = {"training": {"steps": 4, "groups_per_step": 2, "group_size": 8}, "evaluation": {"problems": 64}}
    theirs, ours = (carry_out(smaller(case, sizes), 1) for case in (TRL_SAME_DRAWS, COLOCATED))
    assert [step["mean_reward"] for step in theirs.steps] == [step["mean_reward"] for step in ours.steps]
    assert [point.accuracy for point in theirs.points] == [point.accuracy for point in ours.points]
    assert len({point.accuracy for point in ours.points}) > 1, "it has learned"


def test_alone_it_reports_the_time_of_each_point(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from benchmarks.papers.trl_run import main

    main(0, tmp_path / "report.json", steps=1)
    document = json.loads((tmp_path / "report.json").read_text())
    (first_s, _), (last_s, _) = document["points"]
    assert first_s < last_s and document["steps"] == 1
