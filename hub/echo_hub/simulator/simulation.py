"""One scenario, from its beginning to its figures."""

from __future__ import annotations

import gc
from collections.abc import Callable

from echo_hub.core.coordinator import Coordinator
from echo_hub.simulator.report import Report, report_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.world import MakeCoordinator, World


def simulate(scenario: Scenario, clock: Callable[[], float], *, make: MakeCoordinator = Coordinator) -> Report:
    """`clock`: what the coordinator's own cost is measured by; nothing else depends on it. `make`: another coordinator
    than the hub's own.

    The nodes are kept from the garbage collector, which would look through them at the coordinator's expense.
    """
    world = World(scenario, clock, make=make)
    gc.collect()
    gc.freeze()
    try:
        world.run()
    finally:
        gc.unfreeze()
    return report_of(world)
