"""The hub's own coordinator with simulated nodes, in virtual time: how busy the learner is, what is wasted, its cost.

- By size: the processor time of the coordinator's own events, with 10 to 100,000 nodes, each size in a process of its
  own; its memory after the run, when nobody holds work any more.
- False claims: nodes that claim a capacity of 4,096 and return nothing.
- A day of volunteers' machines that come and go: see `days`.
- The speed-up over dispatch by whole groups, in order and blind, where sampling is what limits: see `speed_up`.
- What it gains and costs that nodes swap versions in mid-completion: see `interrupting`.
- Cost: what the choice of nodes saves: see `cost`.
- The capacity model's prediction beside the simulated utilisation: see `prediction`.
- The grid: 100 nodes whose throughput is log-normal, by its sigma, the staleness bound S and the time a step takes. The
  pool samples in time 1.15 times what the learner takes; where no pool can be enough, the case is left out.

`mean_staleness_over_needed`: the mean staleness less the least that any schedule has that keeps the learner busy, as
`echo_hub.simulator.rule` derives it; where the learner waits, it can be negative. Headlines of the grid are those of
its worst case. `drops` in the rows: rollouts by the reason why they were dropped, as shares of those leased.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, Final

from benchmarks.measurement import Measurement
from benchmarks.progress import Planned, Progress
from benchmarks.simulate import cases, cost, days, interrupting, prediction, speed_up
from benchmarks.simulate.kind import Case, Kind, Row

DESCRIPTION: Final = (
    "The coordinator with simulated nodes: learner utilisation, staleness, waste, events a second, memory"
)

KINDS: Final[tuple[Kind, ...]] = (
    cases.SIZES_KIND,
    cases.FALSE_CLAIMS_KIND,
    speed_up.KIND,
    interrupting.KIND,
    days.KIND,
    cases.GRID_KIND,
    cost.KIND,
    prediction.KIND,
)
"""In the order of the table."""


def plan() -> list[Planned]:
    return [Planned(name=case.name, seconds=case.seconds, lacks=case.lacks) for kind in KINDS for case in kind.cases]


def measure(seed: int, progress: Progress) -> Measurement:
    """Kinds that measure processor time first; then all others side by side."""
    rows: dict[str, Row] = {}
    rows |= _measure([kind for kind in KINDS if kind.alone], seed, progress, workers=1)
    rows |= _measure([kind for kind in KINDS if not kind.alone], seed, progress, workers=os.cpu_count() or 1)
    details = {name: row.pop("details") for name, row in rows.items() if "details" in row}
    conditions: dict[str, Any] = {}
    for kind in KINDS:
        conditions |= kind.conditions
    return Measurement(
        headline=headline(rows),
        rows=[rows[case.name] for kind in KINDS for case in kind.cases if case.name in rows],
        conditions={**conditions, "details": details},
    )


def headline(rows: dict[str, Row]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        found |= kind.headline(rows)
    return found


def _measure(kinds: Sequence[Kind], seed: int, progress: Progress, *, workers: int) -> dict[str, Row]:
    """Every wanted case, each in a fresh process, the longest first."""
    told = {case.name: kind.told for kind in kinds for case in kind.cases}
    wanted = [case for kind in kinds for case in kind.cases if progress.wants(case.name)]
    rows: dict[str, Row] = {}
    if not wanted:
        return rows
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(wanted)), mp_context=context, max_tasks_per_child=1) as pool:
        running = {pool.submit(_row, case, seed): case for case in sorted(wanted, key=_longest_first)}
        for future in as_completed(running):
            name = running[future].name
            rows[name] = future.result()
            progress.done(name, {figure: rows[name][figure] for figure in told[name]})
    return rows


def _longest_first(case: Case) -> float:
    return -case.seconds


def _row(case: Case, seed: int) -> Row:
    return {"case": case.name, **case.row(seed)}
