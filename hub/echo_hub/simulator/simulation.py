"""One scenario, from its beginning to its figures."""

from __future__ import annotations

from collections.abc import Callable

from echo_hub.garbage import Garbage
from echo_hub.simulator.report import Report, report_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.world import World


def simulate(scenario: Scenario, clock: Callable[[], float]) -> Report:
    """`clock`: what the coordinator's own cost is measured by; nothing else depends on it.

    The garbage collector works as it does in a hub.
    """
    world = World(scenario, clock)
    with Garbage() as garbage:
        world.core.handled = garbage.handled
        world.run()
    return report_of(world)
