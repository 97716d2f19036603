"""Node pools of the simulation grid are just large enough to keep the learner busy."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulate import cases
from benchmarks.simulate.cases import MARGIN, grid_lacks, grid_scenario
from echo_hub.simulator.rule import demand_of, pool_of, useful_rollouts
from echo_hub.simulator.simulation import simulate

POSSIBLE = [
    {"sigma": sigma, "max_staleness": bound, "step_s": step_s}
    for sigma in cases.SIGMAS
    for bound in cases.STALENESS_BOUNDS
    for step_s in cases.STEPS
    if not grid_lacks(max_staleness=bound, step_s=step_s)
]


@pytest.mark.parametrize("case", POSSIBLE, ids=str)
def test_a_pool_samples_in_time_the_margin_over_what_is_taken(case: dict[str, Any]) -> None:
    scenario = grid_scenario(3, **case)
    demand = demand_of(scenario)
    assert (demand.step_s, demand.max_staleness) == (case["step_s"], case["max_staleness"])
    assert useful_rollouts(pool_of(scenario), demand) / demand.rollouts_per_step == pytest.approx(MARGIN, rel=1e-5)
    assert scenario.nodes.s_per_token == pytest.approx(cases.S_PER_TOKEN, rel=0.05)


def test_no_pool_is_enough_where_the_steps_are_over_before_a_rollout_is_scored() -> None:
    assert not grid_lacks(max_staleness=3, step_s=1.0)
    assert "S steps are over" in grid_lacks(max_staleness=2, step_s=1.0)


@pytest.mark.parametrize(
    ("sigma", "bound", "step_s", "seed", "steps", "busy"),
    [
        (
            0.5,
            1,
            5.0,
            0,
            16,
            0.95,
        ),  # From publication to the last step that may use it, two rollouts fit.
        (1.0, 1, 5.0, 1, 16, 0.95),  # A slow node takes longer per rollout, which the hub cannot know at first.
        (0.5, 4, 1.0, 0, 60, 0.95),  # A rollout takes two steps, so even a slightly late start makes it stale.
        (1.0, 2, 5.0, 0, 16, 0.95),
    ],
)
def test_a_pool_that_is_just_enough_keeps_the_learner_busy(
    sigma: float, bound: int, step_s: float, seed: int, steps: int, busy: float
) -> None:
    scenario = grid_scenario(seed, sigma=sigma, max_staleness=bound, step_s=step_s)
    training = scenario.training.model_copy(update={"steps": steps})
    report = simulate(scenario.model_copy(update={"training": training}), lambda: 0.0)
    assert report.utilisation >= busy
    assert report.stale_share <= 0.03
