"""Cost of a hub on the database of a long run: a million rollouts, with 1,000 and with 10,000 connected nodes.

Hub and store are real; `benchmarks.harness.books` has filled the database. Nodes are connected in the hub's own parts,
without sockets, and nothing is trained. Times are processor times on SQLite, and clock times on PostgreSQL, whose
server has a process of its own. Each case runs in a process of its own.

- `start_s`: from the start to an open port, with the search for damage.
- `snapshot_ms`: median time of one picture of run and nodes, after news from 1 in 50 nodes.
- `leaderboard_ms`, `metrics_ms`: the hub's processor time per answer of `/leaderboard` and `/metrics`, the median.
- `worst_query_ms`: the writer's slowest statement for one set of parameters, in the fastest of three steps, so that
  other work of the machine counts little; `worst_query` names it.
- `bytes_per_rollout`: tables of rollouts, groups, steps and credit with their indices, without tokens, which have a cap
  of their own. `bytes_per_version_per_node`: growth of the database with each version that all nodes fetch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.growth.case import measure_run
from benchmarks.harness.books import Amount
from benchmarks.harness.pool import pool
from benchmarks.harness.postgresql import lacking, postgresql
from benchmarks.harness.progress import Measurement, Planned, Progress

DESCRIPTION: Final = "A hub on the books of a million rollouts and thousands of nodes: start, pages, queries, bytes"
ROLLOUTS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A number of nodes, with steps that have a few rollouts of each node."""

    name: str
    nodes: int
    groups_per_step: int
    seconds: float
    server: bool = False
    """True for PostgreSQL."""

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
    return [Planned(name=case.name, seconds=case.seconds, lacks=lacking() if case.server else "") for case in CASES]


def measure(seed: int, progress: Progress, *, scale: float = 1.0) -> Measurement:
    """Measure with nodes, rollouts and groups a step multiplied by `scale`."""
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if progress.wants(case.name):
            with pool(1) as process:
                row = process.submit(_measure_case, case, case.amount(scale), seed).result()
            rows.append({"case": case.name, **row})
            progress.so_far = Measurement(headline=headline(rows), rows=rows)
            progress.done(case.name, row)
    return Measurement(headline=headline(rows), rows=rows)


def _measure_case(case: Case, amount: Amount, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="echo-growth-") as scratch:
        if not case.server:
            return measure_run(Path(scratch), "", amount, seed=seed)
        with postgresql() as server:
            return measure_run(Path(scratch), server.url, amount, seed=seed)


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of each case: "..._N" of N nodes with SQLite, "..._N_postgresql" with PostgreSQL. None: not measured."""
    by_case = {row["case"]: row for row in rows}
    found: dict[str, Any] = {}
    for case in CASES:
        row = by_case.get(case.name, {})
        ending = f"{case.nodes}_postgresql" if case.server else f"{case.nodes}"
        for name in ("snapshot_ms", "leaderboard_ms", "metrics_ms", "start_s", "worst_query_ms", "bytes_per_rollout"):
            found[f"{name}_{ending}"] = row.get(name)
        found[f"bytes_per_version_per_node_{ending}"] = row.get("bytes_per_version_per_node")
    return found
