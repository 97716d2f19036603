"""What a node at its default settings takes from its owner's own program, on the same cores."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.manners.models import Models
from benchmarks.manners.scene import Engine, Scene, scene
from benchmarks.progress import Progress

PROGRAM: Final = "x = 0\nfor n in range({rounds}):\n    x = (x * 1103515245 + n) & 0xffffffff"
"""Computes, and nothing else."""
ROUNDS: Final = 12_000_000
PAIRS: Final = 15
WITHIN_S: Final = 120.0
LEAST: Final = 5


async def measure(scratch: Path, models: Models, engine: Engine, progress: Progress) -> Mapping[str, Any]:
    """Times of one program, and of one for each core, beside a sampling node and beside a paused one, by turns."""
    ratios: dict[int, list[float]] = {1: [], psutil.cpu_count() or 1: []}
    async with scene(scratch, models(engine.model), engine) as node:
        for _ in progress.repetitions(PAIRS, within_s=WITHIN_S, least=LEAST):
            for programs, found in ratios.items():
                beside_s = await _time(programs)
                await _still(node)
                alone_s = await _time(programs)
                await node.resume()
                await node.until_sampling()
                found.append(beside_s / alone_s)
    one, all_cores = ratios[1], ratios[max(ratios)]
    return {
        "owner_slowdown_1": statistics.median(one),
        "owner_slowdown_all": statistics.median(all_cores),
        "owner_slowdown_quartiles": [statistics.quantiles(found)[::2] for found in (one, all_cores)],
        "pairs": len(one),
    }


async def _still(node: Scene) -> None:
    await node.pause()
    await node.until(lambda: (engine := node.engine) is None or engine.status() == psutil.STATUS_STOPPED)


async def _time(programs: int) -> float:
    """Until all of them have ended."""
    began = time.monotonic()
    code = PROGRAM.format(rounds=ROUNDS)
    running = [await asyncio.create_subprocess_exec(sys.executable, "-c", code) for _ in range(programs)]
    for process in running:
        await process.wait()
    return time.monotonic() - began
