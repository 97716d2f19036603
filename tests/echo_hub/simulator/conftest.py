from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from echo_hub.simulator.report import SimulationReport, report_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.world import World

EVEN: dict[str, dict[str, Any]] = {
    "training": {"steps": 8, "groups_per_step": 1, "group_size": 2, "max_staleness": 1},
    "learner": {"step_s": 5.0, "score_s": 0.05},
    "publication": {"export_s": 0.2, "payload_bytes": 0, "start_s": 0.3},
    "nodes": {"count": 1, "width": 2, "sigma": 0.0, "s_per_token": 0.02, "delay_s": 0.05},
    "measuring": {"warm_up_steps": 2},
}
"""One node samples two rollouts of 100 tokens in 2 s, and fetches a version in 0.5 s."""


def even(**sections: dict[str, Any]) -> Scenario:
    names = EVEN.keys() | sections.keys()
    return Scenario.model_validate({name: {**EVEN.get(name, {}), **sections.get(name, {})} for name in names})


def ran(scenario: Scenario) -> tuple[World, SimulationReport]:
    world = World(scenario)
    world.run()
    return world, report_of(world)


@pytest.fixture
def scenario_of() -> Callable[..., Scenario]:
    return even


@pytest.fixture
def simulated() -> Callable[..., tuple[World, SimulationReport]]:
    return lambda **sections: ran(even(**sections))
