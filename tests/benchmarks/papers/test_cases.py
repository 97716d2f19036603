from __future__ import annotations

import pytest

from benchmarks.papers import TABLES
from benchmarks.papers.cases import COLOCATED, Case, smaller, stale


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_cases_settings_fit(table: object) -> None:
    for case in table.cases:  # type: ignore[attr-defined]
        assert case.config(7).run.seed == 7


def test_a_stale_run_has_its_settings_and_the_staleness_bound() -> None:
    settings = stale(11, training={"updates_per_step": 4}, objective={"name": "aipo"})
    config = Case(name="", settings=settings).config(0)
    assert (config.run.mode, config.training.max_staleness, config.training.updates_per_step) == ("async", 11, 4)
    assert config.objective.name == "aipo"


def test_a_smaller_case_keeps_its_other_settings() -> None:
    case = smaller(Case(name="", settings=stale(3)), {"training": {"steps": 2}})
    config = case.config(0)
    assert (config.training.steps, config.training.max_staleness, config.run.mode) == (2, 3, "async")
    assert COLOCATED.config(0).training.steps > 2
