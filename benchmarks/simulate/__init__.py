"""The hub's own coordinator with simulated nodes, in virtual time: learner utilisation, waste, speed, cost.

- Sizes: processor time of the coordinator's events with 10 to 100,000 nodes, and its memory after the run.
- False claims: nodes that claim a capacity of 4,096 rollouts and return nothing.
- A day of volunteers' machines that come and go: see `days`.
- Effect of nodes that change versions within a completion: see `interrupting`.
- Cost: savings by the choice of nodes: see `cost`.
- Grid: 100 nodes of log-normal throughput. Cases differ in its sigma, in the staleness bound S and in the time of a
  step. The pool samples 1.15 times what the learner needs. If no pool is enough, the case is omitted.

`mean_staleness_over_needed` is the mean staleness minus the least staleness of any schedule that keeps the learner busy
(`echo_hub.simulator.rule`). It can be negative where the learner waits. Headline figures of the grid come from its
worst case. `drops` has the share of leased rollouts that were dropped, by reason.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks.harness.pool import each
from benchmarks.harness.progress import Measurement, Planned, Progress
from benchmarks.simulate import cases, cost, days, interrupting
from benchmarks.simulate.cases import Case, Row

DESCRIPTION: Final = (
    "The coordinator with simulated nodes: learner utilisation, staleness, waste, events a second, memory"
)
PARALLEL: Final = (*cases.FALSE_CLAIMS, *interrupting.CASES, *days.CASES, *cases.GRID, *cost.CASES)
ALL: Final = (*cases.SIZES_CASES, *PARALLEL)
CONDITIONS: Final = {
    "events": "processor time of the coordinator's calls alone; garbage collection is included, but objects from "
    "before the run, such as the simulated nodes, are frozen; details have the kinds of events",
    "bytes_per_node": "sys.getsizeof of all that the coordinator holds after the end of the run",
    "useful_over_needed": cases.MARGIN,
    "day_useful_over_needed": days.MARGIN,
    "interrupt_useful_over_needed": interrupting.MARGIN,
    "interrupt_seeds": interrupting.SEEDS,
}


def plan() -> list[Planned]:
    return [Planned(name=case.name, seconds=case.seconds, lacks=case.lacks) for case in ALL]


def measure(seed: int, progress: Progress) -> Measurement:
    """Measure every wanted case in a new process. First come the cases that measure processor time, one at a time; then
    all others in parallel, the longest first.
    """
    rows: dict[str, Row] = {}
    told = {case.name: case.told for case in ALL}
    for some, workers in ((cases.SIZES_CASES, 1), (PARALLEL, None)):
        wanted = sorted((case for case in some if progress.wants(case.name)), key=lambda case: -case.seconds)
        for name, row in each(_row, {case.name: (case, seed) for case in wanted}, workers=workers, tasks_per_child=1):
            rows[name] = row
            progress.done(name, {figure: row[figure] for figure in told[name]})
    details = {name: row.pop("details") for name, row in rows.items() if "details" in row}
    return Measurement(
        headline=headline(rows),
        rows=cases.measured(ALL, rows),
        conditions={**CONDITIONS, "details": details},
    )


def headline(rows: dict[str, Row]) -> dict[str, Any]:
    return {name: value for of in (cases, interrupting, days, cost) for name, value in of.headline(rows).items()}


def _row(case: Case, seed: int) -> Row:
    try:
        return {"case": case.name, **case.row(seed)}
    except RuntimeError as error:
        raise RuntimeError(f"{case.name}: {error}") from error
