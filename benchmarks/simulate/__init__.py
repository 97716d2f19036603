"""The hub's own coordinator with simulated nodes, in virtual time: how busy the learner is, what is wasted, its cost.

- The grid: 100 nodes whose throughput is log-normal, by its sigma, the staleness bound S and the time a step takes. The
  pool samples in time 1.15 times what the learner takes; where no pool can be enough, the case is left out.
- By size: the processor time of the coordinator's own events, with 10 to 100,000 nodes, each size in a process of its
  own; its memory after the run, when nobody holds work any more.
- Cost: see `benchmarks.simulate.cost`.
- False claims: nodes that claim a capacity of 4,096, return nothing and come back with fresh keys.

`mean_staleness_over_needed`: the mean staleness less the least that any schedule has that keeps the learner busy, as
`echo_hub.simulator.rule` derives it; where the learner waits, it can be negative. Headlines of the grid are those of
its worst case.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, Final

from benchmarks.measurement import Measurement
from benchmarks.progress import Planned, Progress
from benchmarks.simulate.cases import BY_SIZE, FALSE_CLAIMS, GRID, MARGIN, Case
from benchmarks.simulate.cost import COSTS, CostCase, cost_headline
from benchmarks.simulate.simulated import row_of

DESCRIPTION: Final = (
    "The coordinator with simulated nodes: learner utilisation, staleness, waste, events a second, memory"
)

TOLD: Final = ("utilisation", "stale_share", "staleness", "over_needed", "liars_share", "events_per_s")

Row = dict[str, Any]


def plan() -> list[Planned]:
    return [
        *(Planned(name=case.name, seconds=case.seconds) for case in BY_SIZE),
        Planned(name=FALSE_CLAIMS.name, seconds=FALSE_CLAIMS.seconds),
        *(Planned(name=case.name, seconds=case.seconds, lacks=case.infeasible) for case in GRID),
        *(Planned(name=case.name, seconds=case.seconds) for case in COSTS),
    ]


def measure(seed: int, progress: Progress) -> Measurement:
    """Sizes one after the other, so that their processor times are not each other's; then the rest side by side."""
    sized = _side_by_side(BY_SIZE, seed, progress, workers=1)
    rest = _side_by_side((FALSE_CLAIMS, *GRID, *COSTS), seed, progress, workers=os.cpu_count() or 1)
    rows = {**sized, **rest}
    details = {case.name: row.pop("details") for case, row in rows.items()}
    return Measurement(
        headline=headline(rows),
        rows=[rows[case] for case in (*BY_SIZE, FALSE_CLAIMS, *GRID, *COSTS) if case in rows],
        conditions={
            "useful_over_needed": MARGIN,
            "events": "processor time of the coordinator's calls alone; garbage collection is included, but what was "
            "there before the run, the simulated nodes among it, is frozen; details have the kinds of events",
            "bytes_per_node": "sys.getsizeof over all that the coordinator holds after the run's end",
            "details": details,
        },
    )


def headline(rows: dict[Case | CostCase, Row]) -> dict[str, float | None]:
    grid = [rows[case] for case in GRID if case in rows]
    few, _, many = (rows.get(case) for case in BY_SIZE)
    return {
        "utilisation_hetero": min((row["utilisation"] for row in grid), default=None),
        "stale_share": max((row["stale_share"] for row in grid), default=None),
        "mean_staleness_over_needed": max((row["over_needed"] for row in grid), default=None),
        "false_claims_share": rows[FALSE_CLAIMS]["liars_share"] if FALSE_CLAIMS in rows else None,
        "events_per_s_10": few["events_per_s"] if few else None,
        "events_ratio_100k": many["events_per_s"] / few["events_per_s"] if few and many else None,
        "worst_event_ms_100k": many["worst_event_ms"] if many else None,
        "bytes_per_node": many["bytes_per_node"] if many else None,
        **cost_headline([rows[case] for case in COSTS if case in rows]),
    }


def _side_by_side(
    cases: Sequence[Case | CostCase], seed: int, progress: Progress, *, workers: int
) -> dict[Case | CostCase, Row]:
    """Every wanted case, each in a fresh process, the longest first."""
    wanted = sorted((case for case in cases if progress.wants(case.name)), key=lambda case: -case.seconds)
    rows: dict[Case | CostCase, Row] = {}
    if not wanted:
        return rows
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(wanted)), mp_context=context, max_tasks_per_child=1) as pool:
        running = {pool.submit(row_of, case, seed): case for case in wanted}
        for future in as_completed(running):
            case = running[future]
            rows[case] = future.result()
            progress.done(case.name, {name: rows[case][name] for name in TOLD})
    return rows
