"""One case, simulated in this process: its row."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from benchmarks.simulate.cases import Case, SizeCase
from benchmarks.simulate.cost import CostCase, cost_row
from echo_hub.simulator.simulation import simulate


def row_of(case: Case | CostCase, seed: int) -> dict[str, Any]:
    """`details` is what is not in the table. Times are of this process's processor."""
    if isinstance(case, CostCase):
        return cost_row(case, seed)
    scenario = case.scenario(seed)
    began_at = time.process_time()
    report = simulate(scenario, time.process_time)
    seconds = time.process_time() - began_at
    if not report.balanced:
        raise RuntimeError(f"{case.name}: rollouts are not accounted for: {report}")
    needed = report.needed_staleness
    return {
        "case": case.name,
        "utilisation": report.utilisation,
        "stale_share": report.stale_share,
        "staleness": report.mean_staleness,
        "over_needed": None if needed is None else report.mean_staleness - needed,
        "idle_nodes": report.idle_nodes_share,
        "liars_share": report.liars_share,
        "events_per_s": report.core.events_per_s,
        "worst_event_ms": report.core.worst_event_ms,
        "bytes_per_node": report.core.bytes_per_node if isinstance(case, SizeCase) else None,
        "details": {**asdict(report), "rollouts_per_step": scenario.rollouts_per_step, "processor_s": seconds},
    }
