"""Slowdown of an owner's program by a node with default settings on the same cores.

The node is a separate process, like on a volunteer's machine; the hub runs in this process.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.harness.progress import Progress
from benchmarks.harness.site import family, node_process, processor_s
from benchmarks.manners.scene import PATIENCE_S, Engine, Models, engine_of, working_hub
from echo_node.host import control
from echo_node.host.paths import NodePaths
from echo_shared.errors import ConnectError
from echo_shared.wire.messages import NodeStatus

PROGRAM: Final = "x = 0\nfor n in range({rounds}):\n    x = (x * 1103515245 + n) & 0xffffffff"
"""Stands for the owner's program: it only computes."""
ROUNDS: Final = 6_000_000
"""Rounds of the program's loop, which take about half a second. In a longer time the machine's speed could change."""
PAIRS: Final = 60
WITHIN_S: Final = 120.0
LEAST: Final = 5
LOOK_S: Final = 0.02


async def measure(scratch: Path, models: Models, progress: Progress, *, engine: Engine) -> Mapping[str, Any]:
    """Time one copy of the program, and one copy per core, alternately next to a sampling node and next to a paused
    node.
    """
    ratios: dict[int, list[float]] = {1: [], psutil.cpu_count() or 1: []}
    async with _node(scratch, models(engine.model), engine) as node:
        for number in progress.repetitions(PAIRS, within_s=WITHIN_S, least=LEAST):
            for programs, found in ratios.items():
                took_s = {}
                # The order alternates, so that a change of the machine's speed favours neither.
                for is_paused in (False, True) if number % 2 else (True, False):
                    await (node.pause() if is_paused else node.resume())
                    took_s[is_paused] = await _time(programs)
                found.append(took_s[False] / took_s[True])
    one, all_cores = ratios[1], ratios[max(ratios)]
    return {
        "owner_slowdown_1": statistics.median(one),
        "owner_slowdown_all": statistics.median(all_cores),
        "pairs": len(one),
    }


@dataclass(frozen=True, slots=True)
class _Node:
    process: psutil.Process
    control_file: Path

    async def pause(self) -> None:
        await control.ask(self.control_file, "pause")
        async with asyncio.timeout(PATIENCE_S):
            while not self._is_still():  # noqa: ASYNC110 - A process does not report that it stands still.
                await asyncio.sleep(LOOK_S)

    async def resume(self) -> None:
        await control.ask(self.control_file, "resume")
        await self.until_sampling()

    async def until_sampling(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await self._is_sampling():  # noqa: ASYNC110 - A node only answers.
                await asyncio.sleep(LOOK_S)

    def _is_still(self) -> bool:
        engine = engine_of(self.process)
        return engine is None or engine.status() == psutil.STATUS_STOPPED

    async def _is_sampling(self) -> bool:
        with suppress(ConnectError):  # The node is still starting.
            return bool((await control.ask(self.control_file, "status"))["activity"] == "sampling")
        return False


@asynccontextmanager
async def _node(scratch: Path, base: Path, engine: Engine) -> AsyncIterator[_Node]:
    """Run a node with endless work during the block. Yield when it samples."""
    home = scratch / "node"
    options = ("--backend", engine.backend, "--threads", "0", "--swarm-host", "127.0.0.1")
    env = {"ECHO_NODE_MANNERS__PRIORITY": "lowest", "OMP_NUM_THREADS": str(psutil.cpu_count() or 1)}
    async with working_hub(scratch, base) as hub:
        with node_process(hub.url, home, options, env=env) as process:
            node = _Node(psutil.Process(process.pid), NodePaths.find(home).control_file)
            await node.until_sampling()
            yield node


async def _time(programs: int) -> float:
    began = time.monotonic()
    code = PROGRAM.format(rounds=ROUNDS)
    running = [await asyncio.create_subprocess_exec(sys.executable, "-c", code) for _ in range(programs)]
    for process in running:
        await process.wait()
    return time.monotonic() - began


SECONDS: Final = 30.0
SETTLE_S: Final = 5.0


async def measure_paused(scratch: Path, models: Models, _progress: Progress, *, model: str) -> Mapping[str, Any]:
    """Measure the processor share (of one core) and the memory of a paused, connected node."""
    home = scratch / "paused"
    options = ["--backend", "llama_cpp", "--swarm-host", "127.0.0.1"]
    async with working_hub(scratch, models(model)) as hub:
        hub.heartbeat_s = 15.0
        with node_process(hub.url, home, options, env={"ECHO_NODE_MANNERS__PRIORITY": "lowest"}) as node:
            await hub.until(lambda: any(message.capacity for message in hub.all(NodeStatus)))
            await control.ask(NodePaths.find(home).control_file, "pause")
            await asyncio.sleep(SETTLE_S)
            processes = family(psutil.Process(node.pid))
            before_s, began = processor_s(processes), time.monotonic()
            await asyncio.sleep(SECONDS)
            share = (processor_s(processes) - before_s) / (time.monotonic() - began)
            return {"idle_cpu_share": share, "idle_rss_mb": processes[0].memory_info().rss / 1e6}
