"""One hub on a filled database: its start, its pages, its writer's statements, the growth of its tables."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
from sqlalchemy import Engine, func, select, text

from benchmarks.growth.turns import Turns, hearing
from benchmarks.harness.books import GROUP_SIZE, Amount, fill
from benchmarks.harness.models import random_adapter
from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.events import NodeConnected, NodeReported
from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID
from echo_hub.net.gateway import NodeInfo
from echo_hub.net.live_nodes import LiveNode
from echo_hub.run.base_model import resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving.hub import Hub
from echo_hub.serving.opening import open_hub
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.database import connect
from echo_hub.store.store import Store
from echo_hub.store.tables import groups, nodes, rollouts, versions

LOOKS: Final = 7
SHARE_NEW: Final = 50
"""One of this many nodes reports something new between two pictures of the run."""


def connect_all(hub: Hub, node_ids: Sequence[str], *, policy_version: int) -> None:
    """Connect nodes in the hub's own parts, without sockets."""
    coordinator, now = hub.coordinator, time.time()
    coordinator.start(now)
    for node_id in node_ids:
        info = NodeInfo(
            node_id=node_id,
            public_key=bytes(32),
            name=node_id[:8],
            backend="torch",
            device="cpu",
            host="127.0.0.1",
            hub_host="127.0.0.1",
            swarm_port=0,
            mesh_port=0,
        )
        hub.live[node_id] = LiveNode(
            info=info,
            activity="sampling",
            capacity=4,
            policy_version=policy_version,
            tokens_per_s=12.5,
            precision="f16",
        )
        coordinator.handle(NodeConnected(node_id=node_id), now)
        coordinator.handle(NodeReported(node_id=node_id, capacity=4, policy_version=policy_version), now)


async def measure_pages(hub: Hub, run: RunDirectory, node_ids: Sequence[str]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {run.operator_token.read_text().strip()}"}
    await hub.pages.picture()  # Not timed: the first picture reads all nodes.
    pictures = []
    for look in range(LOOKS):
        for node_id in node_ids[look % SHARE_NEW :: SHARE_NEW]:
            hub.live[node_id].tokens_per_s += 0.5
        pictures.append((await hub.pages.picture()).processor_s)

    async def ask(path: str) -> float:
        """Processor milliseconds of one answer, with the request itself."""
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
"""Tables that grow with rollouts."""
PER_VERSION: Final = ("fetches", "versions", "version_tallies")
STEPS: Final = 3
"""Number of steps that the store's writer writes."""


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
    """Start a hub until its port is open; return the seconds."""
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
            if number:  # Skip the first step, during which old versions may still be retired.
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
    """Bytes of these tables with their indices; on PostgreSQL after a vacuum."""
    with engine.connect() as connection:
        if engine.dialect.name != "sqlite":
            connection.execution_options(isolation_level="AUTOCOMMIT").execute(text(f"VACUUM {', '.join(tables)}"))
        if engine.dialect.name == "sqlite":
            of_table = "SELECT name FROM sqlite_master WHERE tbl_name = :name"
            wanted = text(f"SELECT sum(pgsize) FROM dbstat WHERE name IN ({of_table})")
        else:
            wanted = text("SELECT pg_total_relation_size(:name)")
        return sum(int(connection.scalar(wanted, {"name": name}) or 0) for name in tables)
