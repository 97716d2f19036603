from __future__ import annotations

import pytest

from benchmarks.learning.virtual_run import stale
from benchmarks.papers import tables
from benchmarks.papers.runs import Case
from benchmarks.papers.tables import TABLES, Table
from tests.benchmarks.papers.toy import ran


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_cases_settings_fit(table: Table) -> None:
    for case in table.reports:
        assert case.config(7).run.seed == 7


def test_an_old_runs_settings_are_its_own_and_the_bound() -> None:
    settings = stale(11, training={"updates_per_step": 4}, objective={"name": "aipo"})
    config = Case(name="", settings=settings).config(0)
    assert (config.run.mode, config.training.max_staleness, config.training.updates_per_step) == ("async", 11, 4)
    assert config.objective.name == "aipo"


def test_a_run_that_never_reaches_the_target_has_no_steps() -> None:
    found = {tables.SHUFFLE_GRPO: [ran(0.4, 0.8)], tables.SHUFFLED: [ran(0.6, 1.0)]}
    assert tables.SHUFFLE_R1.headline(found) == {"shuffle_steps_ratio": pytest.approx(0.5)}
    never = found | {tables.SHUFFLED: [ran(0.4, 0.5)]}
    assert tables.SHUFFLE_R1.headline(never)["shuffle_steps_ratio"] is None


def test_naive_and_decoupled_differ_only_in_the_ratio() -> None:
    for eta in tables.ETAS:
        configs = [cases[eta].config(0) for cases in (tables.DECOUPLED, tables.RECOMPUTED, tables.BEHAVIOR)]
        assert len({config.training.model_dump_json() for config in configs}) == 1
        assert len({config.objective.chosen_advantage for config in configs}) == 1
        assert len({config.objective.chosen_aggregation for config in configs}) == 1
