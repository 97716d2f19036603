"""One scenario, from its beginning to its figures."""

from __future__ import annotations

from collections.abc import Callable

from echo_hub.core.coordinator import Coordinator
from echo_hub.garbage import Garbage
from echo_hub.simulator.report import Report, report_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.world import MakeCoordinator, World


def simulate(scenario: Scenario, clock: Callable[[], float], *, make: MakeCoordinator = Coordinator) -> Report:
    """`clock`: what the coordinator's own cost is measured by; nothing else depends on it. `make`: another coordinator
    than the hub's own.

    The garbage collector works as it does in a hub.
    """
    world = World(scenario, clock, make=make)
    with Garbage() as garbage:
        world.core.handled = garbage.handled
        world.run()
    return report_of(world)
