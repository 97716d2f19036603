from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.papers.cases import smaller
from benchmarks.papers.echo import TRL
from benchmarks.papers.ran import carry_out

SIZES = {"training": {"steps": 2, "groups_per_step": 2, "group_size": 2}, "evaluation": {"problems": 4}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_it_trains_on_the_runs_problems_and_is_evaluated_as_the_run_is() -> None:
    pytest.importorskip("trl")
    run = carry_out(replace(smaller(TRL, SIZES), evaluate_every=1), 1)
    assert [point.trained_rollouts for point in run.points] == [0, 4, 8]
    assert len(run.steps) == 2 and all(0 <= step["mean_reward"] <= 1 for step in run.steps)
