"""The capacity model's inputs (pool and demand) that follow from a scenario."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from echo_hub.core.capacity.model import Workload
from echo_hub.simulator.rule import classes_of, demand_of, pool_of
from echo_hub.simulator.scenario import Scenario


def test_pool_and_demand_of_a_scenario(scenario_of: Callable[..., Scenario]) -> None:
    scenario = scenario_of(learner={"step_s_per_rollout": 0.5, "handoff_s": 0.25}, availability={"on_share": 0.5})
    found = pool_of(scenario)
    assert found.rollouts_per_s == pytest.approx([2 / 2.0 * 0.5])
    assert found.latency_s == pytest.approx([2.0 + 0.1 + 0.05])
    assert found.broadcast_s == pytest.approx([0.2 + 0.3 + 0.05])
    assert demand_of(scenario) == Workload(
        mode="async",
        rollouts_per_step=2,
        train_s=6.0,
        hand_off_s=0.25,
        broadcast_s=pytest.approx(0.55),
        max_staleness=1,
    )
    assert demand_of(scenario_of(run={"mode": "sequential"})).max_staleness == 0


def test_classes_are_the_pools_nodes_with_the_latency_of_their_long_rollouts(
    scenario_of: Callable[..., Scenario],
) -> None:
    even, uneven = scenario_of(nodes={"count": 2}), scenario_of(nodes={"count": 2}, lengths={"ratio": 10.0})
    for scenario, slower in ((even, False), (uneven, True)):
        found, classes = pool_of(scenario), classes_of(scenario)
        assert [one.rollouts_per_s for one in classes] == pytest.approx(found.rollouts_per_s.tolist())
        for one, latency_s in zip(classes, found.latency_s.tolist(), strict=True):
            assert (one.latency_s > latency_s + 0.5) == slower
            assert one.latency_s >= latency_s - 1e-9
