"""Cost of a paused node: its daemon, and its engine that stands still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.harness.processes import family, node_process, processor_s
from benchmarks.manners.scene import Models, working_hub
from echo_node.host import control
from echo_node.host.paths import Paths
from echo_shared.messages import NodeStatus

SECONDS: Final = 30.0
SETTLE_S: Final = 5.0


async def measure(scratch: Path, models: Models, model: str) -> Mapping[str, Any]:
    """Measure the share of one core, and the memory, of a paused and connected node."""
    home = scratch / "paused"
    options = ["--backend", "llama_cpp", "--swarm-host", "127.0.0.1"]
    async with working_hub(scratch, models(model)) as hub:
        hub.heartbeat_s = 15.0
        with node_process(hub.url, home, options, env={"ECHO_NODE_MANNERS__PRIORITY": "lowest"}) as node:
            await hub.until(lambda: any(message.capacity for message in hub.all(NodeStatus)))
            await control.ask(Paths.find(home).control_file, "pause")
            await asyncio.sleep(SETTLE_S)
            processes = family(psutil.Process(node.pid))
            before_s, began = processor_s(processes), time.monotonic()
            await asyncio.sleep(SECONDS)
            share = (processor_s(processes) - before_s) / (time.monotonic() - began)
            return {"idle_cpu_share": share, "idle_rss_mb": processes[0].memory_info().rss / 1e6}
