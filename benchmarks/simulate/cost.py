"""Savings by the choice of nodes: the cost of a pool if all nodes work, and if only the cheapest sufficient nodes work.

The pool has 100 rented nodes. The price of a node's rollout is log-uniform between a price and four times that price,
independent of its speed. The pool samples 1.5, 2 or 4 times what the learner needs (`echo_hub.simulator.rule`). Both
runs report cost and utilisation after the warm-up steps.

    saving_vs_all_on    1 - cost of a step / cost of a step with all nodes at work
    cost_over_optimum   cost of an hour / cost of an hour in the optimum of a linear programme

The programme knows each node's true speed and may use a fraction of a node: it minimises the cost of shares x in 0..1
with sum of useful_i x_i >= margin R, for the margin of the hub's settings, at which the learner never waits. So the two
costs are comparable if the run's utilisation is 1.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Final

import numpy as np

from benchmarks.harness.progress import least, most
from benchmarks.simulate.cases import Case, Row, figures_of, margin_of, measured, scenario_of
from echo_hub.core.capacity.rule import useful_rollouts_of_each
from echo_hub.simulator.population import draw_nodes
from echo_hub.simulator.report import SimulationReport, connected_cost, report_of
from echo_hub.simulator.rule import demand_of, pool_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.world import World

POOLS: Final = (1.5, 2.0, 4.0)
"""Rollouts that all nodes together sample in time (fresh enough to be trained), as a multiple of what the learner
needs.
"""
SIGMAS: Final = (0.5, 1.0)
STEP_S: Final = 5.0
STEPS: Final = 100
WARM_UP: Final = 40
MAX_STALENESS: Final = 2
SPREAD: Final = 4.0
CENTS: Final = 0.1
"""Price of 1,000 rollouts on the cheapest node, in US dollars."""


def _row(seed: int, *, pool: float, sigma: float) -> Row:
    scenario = cost_scenario(seed, pool=pool, sigma=sigma)
    all_on, _, per_step_all_on = _run(cost_scenario(seed, pool=pool, sigma=sigma, choose=False))
    chosen, per_hour, per_step = _run(scenario)
    for report in (all_on, chosen):
        if not report.balanced or not report.finished:
            raise RuntimeError(f"not finished, or not accounted for: {report}")
    return {
        **figures_of(chosen),
        "utilisation_all_on": all_on.utilisation,
        "saving_vs_all_on": 1 - per_step / per_step_all_on,
        "cost_over_optimum": per_hour / optimal_per_hour(scenario, scenario.prices.margin),
        "details": {**asdict(chosen), "all_on": asdict(all_on)},
    }


def cost_scenario(seed: int, *, pool: float, sigma: float, choose: bool = True) -> Scenario:
    def of(groups: int) -> Scenario:
        return scenario_of(
            seed,
            training={"steps": STEPS, "groups_per_step": groups, "max_staleness": MAX_STALENESS},
            learner={"step_s": STEP_S},
            nodes={"sigma": sigma, "rented_share": 1.0},
            prices={"per_1000_rollouts": CENTS, "spread": SPREAD, "choose": choose},
            measuring={"warm_up_steps": WARM_UP},
        )

    return of(max(1, int(margin_of(of(1)) / pool)))


def _run(scenario: Scenario) -> tuple[SimulationReport, float, float]:
    """Return the report, and the cost after the warm-up in US dollars: per hour and per step."""
    world = World(scenario, time.process_time)
    world.run()
    begin, end = world.steps[WARM_UP - 1][1], world.steps[-1][1]
    if scenario.prices.choose:
        dollars = world.costs.until(end) - world.costs.until(begin)
    else:
        dollars = connected_cost(world) * (end - begin) / world.agenda.now
    return report_of(world), dollars / (end - begin) * 3600, dollars / (len(world.steps) - WARM_UP)


def optimal_per_hour(scenario: Scenario, margin: float) -> float:
    """Return the cost of an hour in the optimum of the linear programme, in US dollars."""
    from scipy.optimize import linprog  # No other case needs scipy.

    price = np.array([node.price_per_hour for node in draw_nodes(scenario)])
    need = margin * demand_of(scenario).rollouts_per_step
    useful = useful_rollouts_of_each(pool_of(scenario), demand_of(scenario))
    solved = linprog(price, A_ub=-useful[np.newaxis], b_ub=[-need], bounds=(0, 1))
    if not solved.success:
        raise RuntimeError(f"no shares of these nodes suffice: {solved.message}")
    return float(solved.fun)


def headline(rows: Mapping[str, Row]) -> dict[str, float | None]:
    found = measured(CASES, rows)
    return {
        "saving_vs_all_on": least(found, "saving_vs_all_on"),
        "cost_over_optimum": most(found, "cost_over_optimum"),
        "utilisation_chosen": least(found, "utilisation"),
        "utilisation_all_on": least(found, "utilisation_all_on"),
    }


CASES: Final = tuple(
    Case(
        name=f"cost, sigma {sigma:g}, pool {pool:g}",
        row=partial(_row, pool=pool, sigma=sigma),
        told=("utilisation", "saving_vs_all_on", "cost_over_optimum"),
        seconds=25.0,
    )
    for sigma in SIGMAS
    for pool in POOLS
)
