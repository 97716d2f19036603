"""What a hub costs on the books of a long run: a million rollouts, by 1,000 and by 10,000 nodes that are connected.

The hub is a real one on a real store; `benchmarks.harness.books` has filled it. Its nodes are connected as the hub's
parts see them, without their sockets; nothing is trained meanwhile. Times are of the processor, on PostgreSQL, whose
server computes elsewhere, by the clock. Each case is a process of its own.

- `start_s`: from nothing to an open port, the look for damage included; `start_over_empty_s`: over an empty run's.
- `snapshot_ms`: one picture of the run and its nodes, a fiftieth of them with something new; the median. The first one
of a hub, `first_snapshot_ms`, reads all nodes.
- `leaderboard_ms`, `metrics_ms`: all that the hub computes for one answer to `/leaderboard` and to `/metrics`, the
median. `loop_ms`: of its event loop's thread, the most of all these.
- `watched_share`: of a core, while a browser watches `/` and something changes all the time.
- `worst_query_ms`: the slowest statement of the writer in its turns, for one set of parameters, of three steps the one
in which it was quickest, so that what else the machine did counts little; `worst_query`: which. `turn_ms`: a whole step
of them.
- `bytes_per_rollout`: the tables of rollouts, groups, steps and credit, all indices included; tokens have a cap of
their own. `bytes_per_version_per_node`: what the books grow by with each version that all nodes fetch.
- `migrate_s`: a million rollouts of the first release's schema brought up to date, and `migrated`: nothing was lost.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.growth.case import measure_run
from benchmarks.growth.first_release import measure_migration
from benchmarks.harness.books import Amount
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.postgresql import lacking, postgresql
from benchmarks.harness.progress import Planned, Progress

DESCRIPTION: Final = "A hub on the books of a million rollouts and thousands of nodes: start, pages, queries, bytes"
ROLLOUTS: Final = 1_000_000
MIGRATION: Final = "from the first release's schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`groups_per_step`: so that a step's rollouts are a few of each node's."""

    name: str
    nodes: int
    groups_per_step: int
    seconds: float
    server: bool = False
    """The store is PostgreSQL."""

    def amount(self, scale: float) -> Amount:
        nodes = max(20, round(scale * self.nodes))
        return Amount(
            nodes=nodes,
            rollouts=max(4_000, round(scale * ROLLOUTS)),
            groups_per_step=max(4, round(scale * self.groups_per_step)),
            under_way=2 * nodes,
        )


CASES: Final = (
    Case(name="1,000 nodes", nodes=1_000, groups_per_step=64, seconds=60),
    Case(name="10,000 nodes", nodes=10_000, groups_per_step=512, seconds=120),
    Case(name="1,000 nodes, PostgreSQL", nodes=1_000, groups_per_step=64, seconds=90, server=True),
    Case(name="10,000 nodes, PostgreSQL", nodes=10_000, groups_per_step=512, seconds=180, server=True),
)


def plan() -> list[Planned]:
    return [
        *(Planned(name=case.name, seconds=case.seconds, lacks=lacking() if case.server else "") for case in CASES),
        Planned(name=MIGRATION, seconds=60),
    ]


def measure(seed: int, progress: Progress) -> Measurement:
    return measure_scaled(seed, progress, 1.0)


def measure_scaled(seed: int, progress: Progress, scale: float) -> Measurement:
    """Nodes, rollouts and groups a step are `scale` times what they are by default."""
    rows: list[dict[str, Any]] = []

    def note(name: str, row: dict[str, Any]) -> None:
        rows.append({"case": name, **row})
        progress.so_far = Measurement(headline=headline(rows), rows=rows)
        progress.done(name, row)

    for case in CASES:
        if progress.wants(case.name):
            note(case.name, _in_a_process(_measure_case, case, case.amount(scale), seed))
    if progress.wants(MIGRATION):
        note(MIGRATION, _in_a_process(_measure_migration, round(scale * ROLLOUTS), seed))
    return Measurement(headline=headline(rows), rows=rows)


def _in_a_process(what: Any, *values: Any) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as one:
        found: dict[str, Any] = one.submit(what, *values).result()
    return found


def _measure_case(case: Case, amount: Amount, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="echo-growth-") as scratch:
        if not case.server:
            return measure_run(Path(scratch), "", amount, seed=seed)
        with postgresql() as server:
            return measure_run(Path(scratch), server.url, amount, seed=seed)


def _measure_migration(rollouts: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="echo-growth-") as scratch:
        return measure_migration(Path(scratch) / "echo.db", rollouts=rollouts, seed=seed)


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By case what has a goal, "_N" of SQLite with N nodes; None was not measured."""
    by_case = {row["case"]: row for row in rows}
    found: dict[str, Any] = {}
    for case in CASES:
        row = by_case.get(case.name, {})
        ending = f"{case.nodes}_postgresql" if case.server else f"{case.nodes}"
        for name in ("snapshot_ms", "leaderboard_ms", "metrics_ms", "start_s", "worst_query_ms", "bytes_per_rollout"):
            found[f"{name}_{ending}"] = row.get(name)
        found[f"bytes_per_version_per_node_{ending}"] = row.get("bytes_per_version_per_node")
    found["migrate_s"] = by_case.get(MIGRATION, {}).get("migrate_s")
    return found
