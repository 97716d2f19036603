from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.papers.cases import COLOCATED, smaller
from benchmarks.papers.echo import TRL, TRL_SAME_DRAWS
from benchmarks.papers.ran import carry_out

SIZES = {"training": {"steps": 2, "groups_per_step": 2, "group_size": 2}, "evaluation": {"problems": 4}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_it_trains_on_the_runs_problems_and_is_evaluated_like_the_run() -> None:
    pytest.importorskip("trl")
    run = carry_out(replace(smaller(TRL, SIZES), evaluate_every=1), 1)
    assert [point.trained_rollouts for point in run.points] == [0, 4, 8]
    assert len(run.steps) == 2 and all(0 <= step["mean_reward"] <= 1 for step in run.steps)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_with_the_same_samples_its_steps_equal_the_hubs() -> None:
    pytest.importorskip("trl")
    sizes = {**SIZES, "training": {**SIZES["training"], "steps": 4, "group_size": 8}, "evaluation": {"problems": 64}}
    theirs, ours = (
        carry_out(replace(smaller(case, sizes), evaluate_every=1), 1) for case in (TRL_SAME_DRAWS, COLOCATED)
    )
    assert [step["mean_reward"] for step in theirs.steps] == [step["mean_reward"] for step in ours.steps]
    assert [point.accuracy for point in theirs.points] == [point.accuracy for point in ours.points]
    assert len({point.accuracy for point in ours.points}) > 1, "it has learned"
