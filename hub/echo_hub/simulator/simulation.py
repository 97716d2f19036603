"""Simulate one scenario and compute its figures."""

from __future__ import annotations

import gc
from collections.abc import Callable

from echo_hub.core.coordinator import Coordinator
from echo_hub.simulator.report import SimulationReport, report_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.world import MakeCoordinator, World


def simulate(
    scenario: Scenario, clock: Callable[[], float], *, make: MakeCoordinator = Coordinator
) -> SimulationReport:
    """Run the scenario and return its report.

    `clock` measures only what the coordinator itself costs. `make` creates the coordinator, for comparisons with the
    hub's own. `gc.freeze` keeps garbage collection from scanning the simulated nodes during the coordinator's events.
    """
    world = World(scenario, clock, make=make)
    gc.collect()
    gc.freeze()
    try:
        world.run()
    finally:
        gc.unfreeze()
    return report_of(world)
