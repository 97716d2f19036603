"""Cost of a hub's pages with thousands of connected nodes: pictures of the run, the leaderboard, /metrics."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

import aiohttp

from echo_hub.core.events import NodeConnected, NodeReported
from echo_hub.intake.connected import LiveNode
from echo_hub.net.gateway import NodeInfo
from echo_hub.run.directory import RunDirectory
from echo_hub.serving.hub import Hub

LOOKS: Final = 7
SHARE_NEW: Final = 50
"""One node in 50 reports something new between two looks."""


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
        hub.nodes.live[node_id] = LiveNode(
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
    await hub.pages.picture()  # The first picture reads all nodes.
    pictures = []
    for look in range(LOOKS):
        for node_id in node_ids[look % SHARE_NEW :: SHARE_NEW]:
            hub.nodes.live[node_id].tokens_per_s += 0.5
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
