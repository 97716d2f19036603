"""Claims of the papers that Echo descends from, and the same comparisons with Echo: a table for each claim.

The papers use models of 1.5 to 405 billion parameters on clusters; this benchmark uses the built-in models on two
cores. It compares the sign and the size of a difference between two ways to train, never an accuracy. Every row has the
paper's result, its scale and its source.

Runs are those of `benchmarks.learning`: the hub's own coordinator, problems and learner, with nodes that take no time,
so that a run with staleness bound S trains on rollouts that are exactly S steps old. Runs have three seeds, and six for
TRL and Shuffle-R1. A run that several tables name is carried out once."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.harness.measurement import Measurement
from benchmarks.harness.progress import Planned, Progress
from benchmarks.papers import archer, batches, echo, staleness, time_to
from benchmarks.papers.cases import SEEDS, STEPS
from benchmarks.papers.plot import draw
from benchmarks.papers.runs import Found, carry_out_all, runs_of
from benchmarks.papers.table import Table

DESCRIPTION: Final = "The claims of the papers that Echo descends from, theirs beside ours"
TABLES: Final = (
    echo.PARITY,
    staleness.AREAL,
    staleness.ECHO_2,
    staleness.LLAMARL,
    batches.FLEET,
    echo.TRL_CURVE,
    batches.SHUFFLE_R1,
    batches.C3PO,
    archer.TURN_CREDIT,
    echo.SMALL_AND_LARGE,
    echo.KNIGHTS_AND_KNAVES,
    echo.SOKOBAN_ROUNDS,
    echo.DISTANCE,
)


def plan() -> list[Planned]:
    """Plan the tables. Runs of an earlier table cost nothing again."""
    seen: set[object] = set()
    planned = []
    for table in TABLES:
        new = [run for run in runs_of(table.wanted) if run not in seen]
        seen.update(new)
        planned.append(Planned(name=table.name, seconds=1 + sum(case.seconds for case, _ in new) / 2))
    return [*planned, time_to.planned()]


def measure(seed: int, progress: Progress) -> Measurement:
    wanted = [table for table in TABLES if progress.wants(table.name)]
    measured = _Measured()

    def done(number: int, found: Found) -> None:
        table = wanted[number]
        measured.add(table, found)
        progress.so_far = measured.as_measurement()
        progress.done(table.name, table.headline(found))

    carry_out_all([table.wanted for table in wanted], seed, done)
    if progress.wants(time_to.NAME):
        measured.add_measurement(time_to.measure(seed, progress))
    return measured.as_measurement()


class _Measured:
    """Results of the finished tables."""

    def __init__(self) -> None:
        self._headline: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []
        self._curves: dict[str, Any] = {}
        self._pictures: dict[str, bytes] = {}

    def add(self, table: Table, found: Found) -> None:
        self._headline |= table.headline(found)
        self._rows += table.rows(found)
        self._curves[table.name] = {
            case.name: [[(point.trained_rollouts, point.accuracy) for point in one.points] for one in ran]
            for case, ran in found.items()
        }
        if table.curves:
            self._pictures[table.name.lower().replace(":", "").replace(" ", "-")] = draw(table, found)

    def add_measurement(self, other: Measurement) -> None:
        self._headline |= other.headline
        self._rows += other.rows

    def as_measurement(self) -> Measurement:
        return Measurement(
            headline=dict(self._headline),
            rows=list(self._rows),
            shown=("table", "case", "accuracy", "lowest", "highest", "seconds"),
            conditions={"seeds": SEEDS, "steps": STEPS, "curves": dict(self._curves)},
            pictures=dict(self._pictures),
        )
