"""Measures how a node yields to its owner: time until its engine has stopped, time until the engine resumes, and lost
tokens.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from benchmarks.harness.progress import Progress
from benchmarks.manners.scene import FREE, GAME, Engine, Models, Scene, scene

News = Literal["pause", "game"]

MOST_TIMES: Final = 25
LEAST_TIMES: Final = 5
WITHIN_S: Final = 40.0
WORK_S: Final = 0.5
"""Seconds of sampling before the owner, that is, the benchmark, pauses the node."""
LOOK_S: Final = 0.002


async def measure(
    scratch: Path, models: Models, progress: Progress, *, engine: Engine, news: News
) -> Mapping[str, Any]:
    """Measure the milliseconds from the owner's command or a sensor's reading until the engine has stopped, and the
    seconds until it samples again.
    """
    yields: list[float] = []
    resumes: list[float] = []
    async with scene(scratch, models(engine.model), engine) as node:
        for _ in progress.repetitions(MOST_TIMES, within_s=WITHIN_S, least=LEAST_TIMES):
            await asyncio.sleep(WORK_S)
            yields.append(await _yield(node, news))
            resumes.append(await _resume(node, news))
        # This count comes after resuming: a stopped engine reports its tokens only then. An ended engine never does.
        lost, under_way = node.lost_tokens()
        paused = {"tokens_lost_per_pause": lost / len(yields), "tokens_under_way_per_pause": under_way / len(yields)}
    how = "resume_s" if news == "pause" else "restart_s"
    return {
        "yield_ms_p50": 1_000 * statistics.median(yields),
        "yield_ms_p99": 1_000 * _p99(yields),
        how: statistics.median(resumes),
        f"{how}_worst": max(resumes),
        **(paused if news == "pause" else {}),
        "times": len(yields),
    }


async def _yield(node: Scene, news: News) -> float:
    engine = node.engine
    assert engine is not None, "it samples"
    watched = asyncio.create_task(asyncio.to_thread(_until_still, engine))
    if news == "pause":
        began = await node.pause()
    else:
        node.owner.reading = GAME
        await node.until(lambda: node.owner.told is GAME)
        began = node.owner.told_at
    return await watched - began


async def _resume(node: Scene, news: News) -> float:
    if news == "pause":
        began = await node.resume()
    else:
        node.owner.reading = FREE
        await node.until(lambda: node.owner.told is FREE)
        began = node.owner.told_at
    return await node.until_sampling() - began


def _until_still(engine: psutil.Process) -> float:
    """Wait until all threads of the engine are stopped or gone; return the monotonic time."""
    while any(state not in "TtZX" for state in _states(engine.pid)):
        time.sleep(LOOK_S)
    return time.monotonic()


def _states(pid: int) -> Iterator[str]:
    """Yield the state of each thread of a process as a letter (proc(5)), such as T for stopped."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return  # The process has just ended.
    for task in tasks:
        with suppress(OSError):  # The thread has just ended.
            yield (task / "stat").read_text().rpartition(")")[2].split()[0]


def _p99(values: list[float]) -> float:
    """Return the 99th percentile; with fewer than a hundred values, the worst."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
