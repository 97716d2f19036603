"""For random pools of nodes, the capacity model must predict the utilisation of the simulated learner, if rollouts take
under a third of a step, and broadcasts under a third of the steps between versions.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from echo_hub.core.capacity.model import Pool
from echo_hub.core.capacity.schedule import predict
from echo_hub.simulator.rule import classes_of, demand_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.simulation import simulate

STEP_S = 10.0
NODES, WIDTH, GROUP_SIZE = 10, 4, 4
MOST = 0.10
"""Largest allowed error of a predicted utilisation, about six times the mean error over many pools."""


def fleet(
    *,
    bound: int,
    every: int,
    sigma: float,
    ratio: float,
    rollout: float,
    broadcast: float,
    throughput: float,
    seed: int,
) -> Scenario:
    """Return a random pool of nodes. Times are in steps; `throughput` is the pool's, relative to the learner's need, if
    every node were like the median one.
    """
    rollouts = NODES * WIDTH / rollout / throughput
    sections: dict[str, Any] = {
        "run": {"seed": seed},
        "training": {
            "steps": 30,
            "groups_per_step": max(1, round(rollouts / GROUP_SIZE)),
            "group_size": GROUP_SIZE,
            "max_staleness": bound,
            "publish_every": every,
        },
        "learner": {"step_s": STEP_S},
        "publication": {"start_s": broadcast * every * STEP_S, "payload_bytes": 0},
        "nodes": {"count": NODES, "width": WIDTH, "sigma": sigma, "s_per_token": rollout * STEP_S / 100},
        "lengths": {"tokens": 100, "ratio": ratio},
        "measuring": {"warm_up_steps": 12, "limit_s": 3000},
    }
    return Scenario.model_validate(sections)


fleets = st.integers(1, 4).flatmap(
    lambda bound: st.builds(
        fleet,
        bound=st.just(bound),
        every=st.integers(1, bound),
        sigma=st.sampled_from([0.0, 0.4]),
        ratio=st.sampled_from([1.0, 3.0]),
        rollout=st.floats(0.1, 0.33),
        broadcast=st.floats(0.02, 0.33),
        throughput=st.floats(0.5, 2.5),
        seed=st.integers(0, 99),
    )
)


def both(scenario: Scenario) -> tuple[float, float]:
    predicted = predict(demand_of(scenario), Pool.of(classes_of(scenario))).utilisation
    return predicted, simulate(scenario, lambda: 0.0).utilisation


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(fleets)
def test_random_fleets_are_as_busy_as_predicted(scenario: Scenario) -> None:
    predicted, simulated = both(scenario)
    event("busy" if predicted > 0.97 else "waits")
    assert abs(predicted - simulated) < MOST, (predicted, simulated, scenario)
