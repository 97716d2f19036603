"""One scenario, simulated in this process: the row of its figures."""

from __future__ import annotations

import time
from dataclasses import asdict

from benchmarks.simulate.kind import Row
from echo_hub.garbage import Garbage
from echo_hub.simulator.report import Report, report_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.world import World


def row_of(name: str, scenario: Scenario, *, with_memory: bool = False) -> Row:
    """`details` is what is not in the table. Times are of this process's processor; its garbage collector works as it
    does in a hub."""
    began_at = time.process_time()
    world = World(scenario, time.process_time)
    with Garbage() as garbage:
        world.core.handled = garbage.handled
        world.run()
    report = report_of(world)
    seconds = time.process_time() - began_at
    check(name, report)
    needed = report.needed_staleness
    return {
        "utilisation": report.utilisation,
        "stale_share": report.stale_share,
        "staleness": report.mean_staleness,
        "over_needed": None if needed is None else report.mean_staleness - needed,
        "idle_nodes": report.idle_nodes_share,
        "liars_share": report.liars_share,
        "drops": {reason: round(share, 4) for reason, share in report.drop_shares.items()},
        "events_per_s": report.core.events_per_s,
        "worst_event_ms": report.core.worst_event_ms,
        "bytes_per_node": report.core.bytes_per_node if with_memory else None,
        "details": {**asdict(report), "rollouts_per_step": scenario.rollouts_per_step, "processor_s": seconds},
    }


def check(name: str, report: Report) -> None:
    """Raises RuntimeError where rollouts are missing."""
    if not report.balanced:
        raise RuntimeError(f"{name}: rollouts are not accounted for: {report}")
