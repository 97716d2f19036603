"""What leasing is for: a pool of unequal nodes that is just enough keeps the learner busy, and little is in vain."""

from __future__ import annotations

import pytest

from benchmarks.simulate.cases import GridCase
from echo_hub.simulator.simulation import simulate


@pytest.mark.parametrize(
    ("sigma", "bound", "step_s", "seed", "steps"),
    [
        (0.5, 1, 5.0, 0, 16),  # Between a version and the step that may take it last there is time for two rollouts.
        (1.0, 1, 5.0, 1, 16),  # One node takes longer than that for one, and nobody knows it at first.
        (0.5, 4, 1.0, 0, 60),  # A rollout takes two steps: who begins a moment too late is stale.
        (1.0, 2, 5.0, 0, 16),
    ],
)
def test_a_pool_that_is_just_enough_keeps_the_learner_busy(
    sigma: float, bound: int, step_s: float, seed: int, steps: int
) -> None:
    scenario = GridCase(sigma=sigma, max_staleness=bound, step_s=step_s).scenario(seed)
    training = scenario.training.model_copy(update={"steps": steps})
    report = simulate(scenario.model_copy(update={"training": training}), lambda: 0.0)
    assert report.utilisation >= 0.95
    assert report.stale_share <= 0.03
