"""A kind of cases: what to simulate, and which headline figures come of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from echo_hub.driving.garbage import Garbage
from echo_hub.simulator.report import SimulationReport, report_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.world import World

Row = dict[str, Any]
"""A case's line of the table. Its `details`, if there are any, go into the conditions instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case, which is pickled and measured in a separate process."""

    name: str
    row: Callable[[int], Row]
    """Measures the case with the given seed."""
    seconds: float = 10.0
    """Expected processor seconds."""
    lacks: str = ""
    """Why the case cannot be measured; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    cases: tuple[Case, ...]
    headline: Callable[[Mapping[str, Row]], dict[str, Any]]
    """Computes the headline figures from the measured rows, which have the cases' names as keys. Figures of cases that
    were not measured are None.
    """
    told: tuple[str, ...]
    """Figures of a row that are printed once it is measured."""
    alone: bool = False
    """True if the cases measure processor time, so that no other case may run at the same time."""
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, measured: Mapping[str, Row]) -> list[Row]:
        """Return the measured rows of this kind."""
        return [measured[case.name] for case in self.cases if case.name in measured]


def simulated(name: str, scenario: Scenario, *, with_memory: bool = False) -> Row:
    """Simulate one scenario with processor time of this process, and with the hub's garbage collection."""
    began_at = time.process_time()
    world = World(scenario, time.process_time)
    with Garbage() as garbage:
        world.core.handled = garbage.handled
        world.run()
    report = report_of(world)
    processor_s = time.process_time() - began_at
    check(name, report)
    return {
        **figures_of(report),
        "idle_nodes": report.idle_nodes_share,
        "drops": {reason: round(share, 4) for reason, share in report.drop_shares.items()},
        "worst_event_ms": report.core.worst_event_ms,
        "bytes_per_node": report.core.bytes_per_node if with_memory else None,
        "details": {**asdict(report), "rollouts_per_step": scenario.rollouts_per_step, "processor_s": processor_s},
    }


def figures_of(report: SimulationReport) -> Row:
    """Return the figures that cases have in common."""
    needed = report.needed_staleness
    return {
        "utilisation": report.utilisation,
        "stale_share": report.stale_share,
        "staleness": report.mean_staleness,
        "over_needed": None if needed is None else report.mean_staleness - needed,
        "liars_share": report.liars_share,
        "events_per_s": report.core.events_per_s,
    }


def check(name: str, report: SimulationReport) -> None:
    """Raises RuntimeError if rollouts are missing."""
    if not report.balanced:
        raise RuntimeError(f"{name}: rollouts are not accounted for: {report}")


def least(rows: Iterable[Row], figure: str) -> Any:
    """Return the smallest value of a figure; None without rows."""
    return min((row[figure] for row in rows), default=None)


def most(rows: Iterable[Row], figure: str) -> Any:
    """Return the largest value of a figure; None without rows."""
    return max((row[figure] for row in rows), default=None)
