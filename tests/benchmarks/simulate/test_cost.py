"""The linear programme finds the cheapest division of the work among the pool's nodes: no other division costs less."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulate.cost import cost_scenario, optimal_per_hour
from echo_hub.core.capacity.rule import useful_rollouts_of_each
from echo_hub.simulator.population import draw_nodes
from echo_hub.simulator.rule import demand_of, pool_of


def test_the_optimum_takes_the_cheapest_and_a_part_of_the_last() -> None:
    pytest.importorskip("scipy", reason="the extra `benchmarks` has it")
    scenario = cost_scenario(1, pool=2.0, sigma=0.5)
    demand = demand_of(scenario)
    useful, missing, dollars = useful_rollouts_of_each(pool_of(scenario), demand), 1.15 * demand.rollouts_per_step, 0.0
    price = np.array([node.price_per_hour for node in draw_nodes(scenario)])
    for node in np.argsort(price / useful):
        part = min(1.0, missing / useful[node])
        dollars, missing = dollars + part * price[node], missing - part * useful[node]
    assert optimal_per_hour(scenario, 1.15) == pytest.approx(dollars)
