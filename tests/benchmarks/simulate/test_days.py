"""A day's pool, and its figures."""

from __future__ import annotations

import pytest

from benchmarks.simulate import days
from benchmarks.simulate.cases import margin_of
from benchmarks.simulate.days import CASES, DayCase
from echo_hub.simulator.population import draw_nodes


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_a_pool_is_enough_on_average_over_the_day(case: DayCase) -> None:
    scenario = case.scenario(0)
    assert margin_of(scenario) == pytest.approx(days.MARGIN, rel=1e-3)
    assert scenario.training.steps * scenario.learner.step_s == days.DAY_S == scenario.measuring.limit_s
    assert (scenario.false_claims.count, scenario.false_claims.capacity) == (10, 4096)


def test_the_largest_pool_is_simulated_for_fewer_steps() -> None:
    assert [case.name for case in CASES] == [
        "a day of 10 nodes",
        "a day of 1,000 nodes",
        "a day of 1,000 nodes on one continent",
        "16 steps of 100,000 nodes",
    ]


def test_on_one_continent_there_are_at_times_few() -> None:
    hours = [DayCase(nodes=200, groups_per_step=1, steps=days.DAY_STEPS, begin_spread=spread) for spread in (1.0, 0.3)]
    phases = [[node.phase for node in draw_nodes(case.scenario(0))] for case in hours]
    evenly, together = (max(of) - min(of) for of in phases)
    assert evenly > 0.95 and together < 0.31


def test_a_row_has_the_day_s_figures() -> None:
    row = DayCase(nodes=10, groups_per_step=1, steps=20, begin_spread=1.0).row(0)
    assert 0 < row["fewest_nodes"] <= row["most_nodes"] <= 10
    assert set(row["drops"]) <= set(row["details"]["dropped"]) and 0 <= row["tokens_again_share"] < 1
    assert row["details"]["by_hour"] and row["details"]["failures"] >= 0


def test_headlines_are_of_a_thousand_nodes() -> None:
    row = {"utilisation": 0.9, "stale_share": 0.01, "tokens_lost_per_failure": 40.0}
    assert days.headline({CASES[1].name: row})["day_utilisation"] == 0.9
    assert set(days.headline({}).values()) == {None}
