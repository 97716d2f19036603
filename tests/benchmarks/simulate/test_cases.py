"""The node pools of the simulation's grid are just large enough to keep the learner busy."""

from __future__ import annotations

import pytest

from benchmarks.simulate.cases import grid_scenario
from echo_hub.simulator.simulation import simulate


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
        ),  # Between a version's publication and the last step that may use it, there is time for two rollouts.
        (1.0, 1, 5.0, 1, 16, 0.95),  # Speeds differ more. At first the hub does not know the slow nodes.
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
