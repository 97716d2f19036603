"""The hub's own coordinator with simulated nodes, in virtual time: learner utilisation, waste, speed, cost.

- Sizes: processor time of the coordinator's events with 10 to 100,000 nodes, and its memory after the run.
- False claims: nodes that claim a capacity of 4,096 rollouts and return nothing.
- A day of volunteers' machines that come and go: see `days`.
- Effect of nodes that change versions within a completion: see `interrupting`.
- Cost: savings by the choice of nodes: see `cost`.
- Grid: 100 nodes of log-normal throughput, by its sigma, the staleness bound S and the time of a step. The pool samples
  1.15 times what the learner needs. Cases in which no pool is enough are left out.

`mean_staleness_over_needed` is the mean staleness minus the least staleness of any schedule that keeps the learner busy
(`echo_hub.simulator.rule`). It can be negative where the learner waits. Headlines of the grid are those of its worst
case. `drops` are rollouts by drop reason, as shares of the leased rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.harness.pool import each
from benchmarks.harness.progress import Measurement, Planned, Progress
from benchmarks.simulate import cases, cost, days, interrupting
from benchmarks.simulate.cases import Case, Kind, Row

DESCRIPTION: Final = (
    "The coordinator with simulated nodes: learner utilisation, staleness, waste, events a second, memory"
)

KINDS: Final[tuple[Kind, ...]] = (
    cases.SIZES_KIND,
    cases.FALSE_CLAIMS_KIND,
    interrupting.KIND,
    days.KIND,
    cases.GRID_KIND,
    cost.KIND,
)


def plan() -> list[Planned]:
    return [Planned(name=case.name, seconds=case.seconds, lacks=case.lacks) for kind in KINDS for case in kind.cases]


def measure(seed: int, progress: Progress) -> Measurement:
    """Measure the cases of processor time first, one at a time; then measure all other cases in parallel."""
    rows = _measure([kind for kind in KINDS if kind.alone], seed, progress, workers=1)
    rows |= _measure([kind for kind in KINDS if not kind.alone], seed, progress, workers=None)
    details = {name: row.pop("details") for name, row in rows.items() if "details" in row}
    conditions = {name: value for kind in KINDS for name, value in kind.conditions.items()}
    return Measurement(
        headline=headline(rows),
        rows=[row for kind in KINDS for row in kind.rows(rows)],
        conditions={**conditions, "details": details},
    )


def headline(rows: dict[str, Row]) -> dict[str, Any]:
    return {name: value for kind in KINDS for name, value in kind.headline(rows).items()}


def _measure(kinds: Sequence[Kind], seed: int, progress: Progress, *, workers: int | None) -> dict[str, Row]:
    """Measure every wanted case in a new process, the longest first."""
    told = {case.name: kind.told for kind in kinds for case in kind.cases}
    wanted = [case for kind in kinds for case in kind.cases if progress.wants(case.name)]
    longest_first = {case.name: (case, seed) for case in sorted(wanted, key=lambda case: -case.seconds)}
    rows: dict[str, Row] = {}
    for name, row in each(_row, longest_first, workers=workers, tasks_per_child=1):
        rows[name] = row
        progress.done(name, {figure: row[figure] for figure in told[name]})
    return rows


def _row(case: Case, seed: int) -> Row:
    try:
        return {"case": case.name, **case.row(seed)}
    except RuntimeError as error:
        raise RuntimeError(f"{case.name}: {error}") from error
