"""Cost of a hub on the database of a long run: a million rollouts, with 1,000 and with 10,000 connected nodes.

Hub and store are real; `benchmarks.harness.books` has filled the database. The hub's own objects hold the connected
nodes, but without sockets, and nothing is trained. Times are processor times on SQLite, and clock times on PostgreSQL,
whose server has a process of its own. Each case runs in a process of its own.

- `start_s`: from the start to an open port, including the search for damage in the database.
- `snapshot_ms`: median time of one picture (the data of run and nodes that the pages show), after one in 50 nodes has
  changed.
- `leaderboard_ms`, `metrics_ms`: the hub's median processor time per answer of `/leaderboard` and `/metrics`.
- `worst_query_ms`: the writer's slowest statement per set of parameters, in the fastest of three steps, so that other
  work on the machine hardly counts; `worst_query` names the statement.
- `bytes_per_rollout`: tables of rollouts, groups, steps and credit with their indices. Tokens are excluded, because the
  hub limits their total size. `bytes_per_version_per_node`: growth of the database with each version that all nodes
  fetch.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
from sqlalchemy import Engine, func, select, text

from benchmarks.growth.turns import Turns, hearing
from benchmarks.harness.books import GROUP_SIZE, Amount, fill
from benchmarks.harness.models import random_adapter
from benchmarks.harness.pool import pool
from benchmarks.harness.postgresql import lacking, postgresql
from benchmarks.harness.progress import Measurement, Planned, Progress
from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.events import NodeConnected, NodeReported
from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID
from echo_hub.run.base_files import resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving.hub import Hub
from echo_hub.serving.opening import open_hub
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.database import connect
from echo_hub.store.store import Store
from echo_hub.store.tables import groups, nodes, rollouts, versions
from echo_shared.records.run import LiveNode

DESCRIPTION: Final = "A hub whose database has a million rollouts and thousands of nodes: start, pages, queries, bytes"

LOOKS: Final = 7
SHARE_NEW: Final = 50
"""One of this many nodes changes between two pictures (the data of run and nodes that the pages show)."""


def connect_all(hub: Hub, node_ids: Sequence[str], *, policy_version: int) -> None:
    coordinator, now = hub.coordinator, time.time()
    coordinator.start(now)
    for node_id in node_ids:
        hub.live[node_id] = LiveNode(
            activity="sampling", capacity=4, policy_version=policy_version, tokens_per_s=12.5, precision="f16"
        )
        coordinator.handle(NodeConnected(node_id=node_id), now)
        coordinator.handle(NodeReported(node_id=node_id, capacity=4, policy_version=policy_version), now)


async def measure_pages(hub: Hub, run: RunDirectory, node_ids: Sequence[str]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {run.operator_token.read_text().strip()}"}
    await hub.pages.picture()  # Not timed: the first picture (data of the pages) reads all nodes.
    pictures = []
    for look in range(LOOKS):
        for node_id in node_ids[look % SHARE_NEW :: SHARE_NEW]:
            live = hub.live[node_id]
            hub.live[node_id] = replace(live, tokens_per_s=live.tokens_per_s + 0.5)
        pictures.append((await hub.pages.picture()).processor_s)

    async def ask(path: str) -> float:
        """Return the processor milliseconds of one answer, its request included."""
        began_s = time.process_time()
        async with http.get(path) as answer:
            await answer.read()
            assert answer.status == 200, (path, answer.status)
        return 1000 * (time.process_time() - began_s)

    async def median(path: str) -> float:
        return statistics.median([await ask(path.format(look)) for look in range(1, LOOKS + 1)])

    async with aiohttp.ClientSession(hub.url, headers=headers, auto_decompress=False) as http:
        for path in ("/", "/metrics", "/leaderboard"):
            await ask(path)
        return {
            "snapshot_ms": 1000 * statistics.median(pictures),
            "leaderboard_ms": await median("/leaderboard?after={}"),
            "metrics_ms": await median("/metrics"),
        }


SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "run": {"name": "growth"},
    "learner": {"threads": 1},
    "evaluation": {"problems": 16},
    "server": {"port": 0, "shared_memory": False},
}
PER_ROLLOUT: Final = ("rollouts", "groups", "steps", "credit_days", "credit_steps")
PER_VERSION: Final = ("fetches", "versions", "version_tallies")
STEPS: Final = 3
HEADLINE: Final = (
    *("snapshot_ms", "leaderboard_ms", "metrics_ms", "start_s", "worst_query_ms", "bytes_per_rollout"),
    "bytes_per_version_per_node",
)


def measure_run(scratch: Path, url: str, amount: Amount, *, seed: int) -> dict[str, Any]:
    """Measure the hub on the database of a long run. `url`: an empty database, or "" for the run's own SQLite file."""
    run = RunDirectory(scratch / "run")
    more = {
        "run": {"name": "growth", "seed": seed},
        "training": {"steps": 1_000_000, "groups_per_step": amount.groups_per_step, "group_size": GROUP_SIZE},
        "store": {"url": url},
    }
    config = load_config(None, {**SETTINGS, **more})
    make_run(run, config)
    return asyncio.run(_measure(run, config, amount, seed))


async def _measure(run: RunDirectory, config: HubConfig, amount: Amount, seed: int) -> dict[str, Any]:
    await _start_s(config, run)  # Not timed: the first start imports modules and makes files.
    engine = connect(config.store.url or run.database_url)
    fill(engine, amount, seed=seed, now=time.time())
    found: dict[str, Any] = {"nodes": amount.nodes, "rollouts": amount.rollouts}
    with engine.connect() as connection:
        newest = connection.scalar(select(func.max(versions.c.policy_version))) or 0
        ids = list(connection.scalars(select(nodes.c.node_id).order_by(nodes.c.node_id)))
    random_adapter(resolve_base("builtin:tiny"), run.adapter(newest), seed)
    per_rollout = _used_bytes(engine, PER_ROLLOUT) / amount.rollouts
    found["start_s"] = await _start_s(config, run)
    async with open_hub(config, run) as hub:
        connect_all(hub, ids, policy_version=newest)
        found |= await measure_pages(hub, run, ids)
    found |= await _measure_writer(config, run, amount, ids)
    engine.dispose()
    return {**found, "bytes_per_rollout": per_rollout}


async def _start_s(config: HubConfig, run: RunDirectory) -> float:
    """Start a hub; return the seconds until its port was open."""
    began_at = time.monotonic()
    async with open_hub(config, run):
        return time.monotonic() - began_at


async def _measure_writer(config: HubConfig, run: RunDirectory, amount: Amount, ids: Sequence[str]) -> dict[str, Any]:
    opened = Store.open(config.store.url or run.database_url)
    engine, store = opened.engine, AsyncStore(opened)
    with engine.connect() as connection:
        training = select(func.max(groups.c.group_id)).where(groups.c.group_id < FIRST_EVALUATION_ID)
        turns = Turns(
            store=store,
            nodes=ids,
            groups_per_step=amount.groups_per_step,
            step=(connection.scalar(select(func.max(versions.c.policy_version))) or 0) + 1,
            lease_id=(connection.scalar(select(func.max(rollouts.c.lease_id))) or 0) + 1,
            group_id=(connection.scalar(training) or 0) + 1,
            now=time.time(),
        )
    of_steps: list[Mapping[str, float]] = []
    grown: list[float] = []
    for number in range(STEPS):
        with hearing(engine) as heard:
            await turns.work()
            before = _used_bytes(engine, PER_VERSION)
            await turns.fetched_by_all()
            await turns.keep_house()
            of_steps.append(heard.worst)
            if number:  # Skip the first step, in which old versions may still be retired.
                grown.append((_used_bytes(engine, PER_VERSION) - before) / len(ids))
    await store.close()
    least = {sql: min(step.get(sql, math.inf) for step in of_steps) for step in of_steps for sql in step}
    worst_query = max(least, key=least.__getitem__)
    return {
        "worst_query_ms": 1000 * least[worst_query],
        "worst_query": worst_query,
        "bytes_per_version_per_node": sum(grown) / len(grown),
    }


def _used_bytes(engine: Engine, tables: Sequence[str]) -> int:
    """Return the bytes that these tables and their indices take in the database; on PostgreSQL after a vacuum, which
    frees deleted rows.
    """
    with engine.connect() as connection:
        if engine.dialect.name != "sqlite":
            connection.execution_options(isolation_level="AUTOCOMMIT").execute(text(f"VACUUM {', '.join(tables)}"))
        if engine.dialect.name == "sqlite":
            of_table = "SELECT name FROM sqlite_master WHERE tbl_name = :name"
            wanted = text(f"SELECT sum(pgsize) FROM dbstat WHERE name IN ({of_table})")
        else:
            wanted = text("SELECT pg_total_relation_size(:name)")
        return sum(int(connection.scalar(wanted, {"name": name}) or 0) for name in tables)


ROLLOUTS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    nodes: int
    groups_per_step: int
    seconds: float
    server: bool = False

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
    """Measure the growth. `scale` multiplies the numbers of nodes, rollouts and groups per step."""
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
    """Return the main figures of each case by name: "..._N" for N nodes with SQLite, "..._N_postgresql" with
    PostgreSQL. A figure that was not measured is None.
    """
    by_case = {row["case"]: row for row in rows}
    return {
        f"{name}_{case.nodes}{'_postgresql' if case.server else ''}": by_case.get(case.name, {}).get(name)
        for case in CASES
        for name in HEADLINE
    }
