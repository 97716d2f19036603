"""What activation saves is compared with all nodes at work and with the linear optimum."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulate import cost
from benchmarks.simulate.cost import COSTS, CostCase, cost_headline, cost_row, optimal_per_hour
from echo_hub.core.capacity.rule import useful_rollouts_of_each
from echo_hub.simulator.population import draw_nodes
from echo_hub.simulator.rule import demand_of, pool_of, useful_rollouts


@pytest.mark.parametrize("case", COSTS, ids=lambda case: case.name)
def test_a_pool_is_as_large_as_it_says_and_its_prices_are_spread(case: CostCase) -> None:
    scenario = case.scenario(3)
    assert scenario.model_copy(update={"prices": scenario.prices.model_copy(update={"choose": False})}) == (
        case.scenario(3, choose=False)
    )
    demand, pool = demand_of(scenario), pool_of(scenario)
    assert useful_rollouts(pool, demand) / demand.rollouts_per_step == pytest.approx(case.pool, rel=0.05)
    price = np.array([node.price_per_hour for node in draw_nodes(scenario)]) / 3600 / pool.rollouts_per_s
    assert 3 < price.max() / price.min() <= 4.0001
    assert 1000 * price.min() == pytest.approx(cost.CENTS, rel=0.1)


def test_the_optimum_takes_the_cheapest_and_a_part_of_the_last() -> None:
    pytest.importorskip("scipy", reason="the extra `benchmarks` has it")
    scenario = CostCase(pool=2.0, sigma=0.5).scenario(1)
    useful, missing, dollars = (
        useful_rollouts_of_each(pool_of(scenario), demand_of(scenario)),
        1.15 * demand_of(scenario).rollouts_per_step,
        0.0,
    )
    price = np.array([node.price_per_hour for node in draw_nodes(scenario)])
    for node in np.argsort(price / useful):
        part = min(1.0, missing / useful[node])
        dollars, missing = dollars + part * price[node], missing - part * useful[node]
    assert optimal_per_hour(scenario, 1.15) == pytest.approx(dollars)


def test_a_small_pool_s_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy", reason="the extra `benchmarks` has it")
    monkeypatch.setattr(cost, "STEPS", 40)
    monkeypatch.setattr(cost, "WARM_UP", 25)
    row = cost_row(CostCase(pool=4.0, sigma=0.5), 0)
    assert row["utilisation"] > 0.9 and row["saving_vs_all_on"] > 0.3 and row["cost_over_optimum"] < 1.3
    assert row["nodes_paid"] < 60 and row["details"]["told"]["cheaper_nodes_suffice"] > 40
    worse = {**row, "saving_vs_all_on": 0.1, "cost_over_optimum": 1.5}
    headline = cost_headline({COSTS[0].name: row, COSTS[1].name: worse})
    assert (headline["saving_vs_all_on"], headline["cost_over_optimum"]) == (0.1, 1.5)
