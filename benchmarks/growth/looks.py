"""Cost of a hub's pages with thousands of connected nodes: pictures of the run, the leaderboard, /metrics."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import aiohttp

from echo_hub.core.events import NodeConnected, NodeReported
from echo_hub.net.gateway import NodeInfo
from echo_hub.net.live_nodes import LiveNode
from echo_hub.run.directory import RunDirectory
from echo_hub.serving.hub import Hub

LOOKS: Final = 7
SHARE_NEW: Final = 50
"""One node in 50 reports something new between two looks."""
WATCHED_S: Final = 10.0
CHANGE_S: Final = 0.05
"""Time between changes while a page is watched."""


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
    first = await hub.pages.picture()
    pictures = []
    for look in range(LOOKS):
        for node_id in node_ids[look % SHARE_NEW :: SHARE_NEW]:
            hub.live[node_id].tokens_per_s += 0.5
        pictures.append((await hub.pages.picture()).processor_s)
    found = {"first_snapshot_ms": 1000 * first.processor_s, "snapshot_ms": 1000 * statistics.median(pictures)}
    loop_s = [0.0]

    async def ask(path: str) -> float:
        """Processor milliseconds of one answer, with the request itself."""
        process_s, own_s = time.process_time(), time.thread_time()
        async with http.get(path) as answer:
            await answer.read()
            assert answer.status == 200, (path, answer.status)
        loop_s[0] = max(loop_s[0], time.thread_time() - own_s)
        return 1000 * (time.process_time() - process_s)

    async with aiohttp.ClientSession(hub.url, headers=headers, auto_decompress=False) as http:
        for path in ("/", "/fleet", "/metrics", "/leaderboard"):
            await ask(path)
        loop_s[0] = 0.0
        found["leaderboard_ms"] = await _median(lambda look: ask(f"/leaderboard?after={look}"))
        found["metrics_ms"] = await _median(lambda look: ask("/metrics"))
        found["fleet_ms"] = await _median(lambda look: ask(f"/fleet?after={look}"))
        found["loop_ms"] = 1000 * loop_s[0]
        found["watched_share"] = await _watched_share(hub, http)
    return found


async def _median(one: Callable[[int], Awaitable[float]]) -> float:
    return statistics.median([await one(look) for look in range(1, LOOKS + 1)])


async def _watched_share(hub: Hub, http: aiohttp.ClientSession) -> float:
    """Share of a core with one watcher of the operator's page."""
    changes = hub.pages.changes

    async def change() -> None:
        while True:
            changes.notify()
            await asyncio.sleep(CHANGE_S)

    async def watch() -> None:
        async with http.get("/", headers={"Accept": "text/event-stream"}) as stream:
            async for _ in stream.content.iter_any():
                pass

    async with asyncio.TaskGroup() as tasks:
        work = [tasks.create_task(change()), tasks.create_task(watch())]
        await asyncio.sleep(WATCHED_S / 5)
        began_s = time.process_time()
        await asyncio.sleep(WATCHED_S)
        share = (time.process_time() - began_s) / WATCHED_S
        for task in work:
            task.cancel()
    return share
