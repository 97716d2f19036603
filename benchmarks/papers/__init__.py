"""Claims of the papers on which Echo builds, compared with Echo's own results: a table for each claim.

The papers use models of 1.5 to 405 billion parameters on clusters; this benchmark uses the built-in models on two
cores, and one language model of 135 M parameters. It compares the sign and the size of a difference between two ways to
train, never an accuracy. Every row has the paper's result, its scale and its source.

Runs are those of `benchmarks.learning`: the hub's own coordinator, problems and learner, with nodes that take no time,
so that a run with staleness bound S trains on rollouts that are exactly S steps old. Runs have three seeds, six for TRL
and Shuffle-R1, and one for the language model. If several tables need the same run, it is done once.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks.harness.progress import Measurement, Planned, Progress
from benchmarks.papers import time_to
from benchmarks.papers.runs import SEEDS, STEPS, Found, carry_out_all, runs_of
from benchmarks.papers.tables import TABLES

DESCRIPTION: Final = "Claims of the papers that Echo descends from, and the same comparisons with Echo"


def plan() -> list[Planned]:
    """Return the planned tables. If several tables need the same run, its time counts for the first of them."""
    seen: set[object] = set()
    planned = []
    for table in TABLES:
        new = [run for run in runs_of(table.wanted) if run not in seen]
        seen.update(new)
        seconds = 1 + sum(case.seconds for case, _ in new) / 2
        planned.append(Planned(name=table.name, seconds=seconds, lacks=table.lacks))
    return [*planned, time_to.planned()]


def measure(seed: int, progress: Progress) -> Measurement:
    wanted = [table for table in TABLES if progress.wants(table.name)]
    headline: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    curves: dict[str, Any] = {}

    def measured() -> Measurement:
        return Measurement(
            headline=dict(headline),
            rows=list(rows),
            shown=("table", "case", "accuracy", "lowest", "highest", "seconds"),
            conditions={"seeds": SEEDS, "steps": STEPS, "curves": dict(curves)},
        )

    def done(number: int, found: Found) -> None:
        table = wanted[number]
        headline.update(table.headline(found))
        rows.extend(table.rows(found))
        curves[table.name] = _curves(found)
        progress.so_far = measured()
        progress.done(table.name, table.headline(found))

    carry_out_all([table.wanted for table in wanted], seed, done)
    if progress.wants(time_to.NAME):
        found = time_to.measure(seed, progress)
        headline.update(found.headline)
        rows.extend(found.rows)
    return measured()


def _curves(found: Found) -> dict[str, list[list[tuple[int, float]]]]:
    return {
        case.name: [[(point.trained_rollouts, point.accuracy) for point in one.points] for one in ran]
        for case, ran in found.items()
    }
