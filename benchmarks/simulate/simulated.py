"""One case, simulated in this process: its row."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict
from typing import Any

from benchmarks.simulate.cases import Case, SizeCase
from echo_hub.simulator.core_cost import held_bytes
from echo_hub.simulator.report import report_of
from echo_hub.simulator.world import World


def simulate(case: Case, seed: int) -> dict[str, Any]:
    """The simulated nodes are no garbage of the coordinator's: they are frozen before it begins."""
    world = World(case.scenario(seed), time.process_time)
    gc.collect()
    gc.freeze()
    began_at = time.process_time()
    world.run()
    seconds = time.process_time() - began_at
    gc.unfreeze()
    report = report_of(world)
    if not report.balanced:
        raise RuntimeError(f"{case.name}: rollouts are not accounted for: {report}")
    needed = report.needed_staleness
    return {
        "case": case.name,
        "utilisation": report.utilisation,
        "stale_share": report.stale_share,
        "staleness": report.mean_staleness,
        "over_needed": report.mean_staleness / needed if needed else None,
        "idle_nodes": report.idle_nodes_share,
        "liars_share": report.liars_share,
        "events_per_s": report.core.events_per_s,
        "worst_event_ms": report.core.worst_event_ms,
        "bytes_per_node": held_bytes(world.core.coordinator) / case.nodes if isinstance(case, SizeCase) else None,
        "details": asdict(report) | {"rollouts_per_step": world.scenario.rollouts_per_step, "processor_s": seconds},
    }
