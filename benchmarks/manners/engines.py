"""Bare engines: the cost of the cage (the engine's sandbox), and the use of the processor at each level of the node's
schedule.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.harness.engine import GROUP_SIZE, texts
from benchmarks.harness.models import SMALL
from benchmarks.harness.progress import Progress
from benchmarks.harness.site import processor_s
from benchmarks.manners.scene import Engine, Models
from echo_node.backends.base import EngineSettings
from echo_node.backends.caging import CageTerms
from echo_node.backends.process import DrawnTokens, EngineChild, Finished
from echo_node.backends.registry import BackendChoice
from echo_node.host.hardware import sensible_threads
from echo_shared.cage.description import CageMode
from echo_shared.process.supervised import ChildLimits

TOKENS: Final = {"caged": 96, "levels": 32}
PAIRS: Final = 40
WITHIN_S: Final = 120.0
LEAST: Final = 8
MODES: Final[tuple[CageMode, ...]] = ("required", "off")
LEVELS: Final = (1.0, 0.5, 0.25)
SETTLE_S: Final = 1.0
SECONDS: Final = 10.0
STREAM_S: Final = 0.2
GROUPS: Final = 2
"""Number of groups that the engine always has, queued or in sampling, while a level of the node's schedule is measured.
"""


async def _start(engine: Engine, base: Path, scratch: Path, mode: CageMode, *, stream_s: float = 0.0) -> EngineChild:
    return await EngineChild.start(
        BackendChoice(name=engine.backend, device="cpu", reason="benchmark"),
        base_dir=base,
        derived_dir=scratch / mode,
        log=scratch / f"{mode}.log",
        settings=EngineSettings(width=GROUP_SIZE, threads=sensible_threads(), stream_s=stream_s),
        limits=ChildLimits(),
        cage=CageTerms(mode=mode),
    )


async def measure_cage(scratch: Path, models: Models, progress: Progress, *, engine: Engine) -> Mapping[str, Any]:
    """Return the speed with the cage relative to the speed without it: the median over pairs, whose order
    alternates.
    """
    base = models(engine.model)
    children = {mode: await _start(engine, base, scratch, mode) for mode in MODES}
    took: dict[CageMode, list[float]] = {mode: [] for mode in MODES}
    try:
        for child in children.values():
            await _turn(child, -1)  # Warms the engine up; this time is not used.
        for number in progress.repetitions(PAIRS, within_s=WITHIN_S, least=LEAST):
            for mode in MODES if number % 2 else MODES[::-1]:
                took[mode].append(await _turn(children[mode], number))
    finally:
        for child in children.values():
            await child.stop()
    pairs = list(zip(*(took[mode] for mode in MODES), strict=True))
    return {
        "caged_speed": statistics.median(bare_s / caged_s for caged_s, bare_s in pairs),
        "pairs": len(pairs),
        "held_by": " and ".join(children["required"].held.by),
    }


async def _turn(child: EngineChild, number: int) -> float:
    """Sample one group; return the seconds that it took. Groups differ only in `number`."""
    (request,) = texts([TOKENS["caged"]], number + 1, vocabulary=SMALL.vocabulary)
    began = time.monotonic()
    await child.submit(replace(request, lease_id=number + 1))
    left = GROUP_SIZE
    async for news in child.events():
        assert isinstance(news, Finished), news
        left -= len(news.rollouts)
        if not left:
            break
    return time.monotonic() - began


async def measure_levels(scratch: Path, models: Models, _progress: Progress, *, engine: Engine) -> Mapping[str, Any]:
    """Sample without a break at each level of the schedule, and measure the engine's processor time and tokens."""
    child = await _start(engine, models(engine.model), scratch, CageTerms().mode, stream_s=STREAM_S)
    drawn = Counter[tuple[int, int]]()
    sampling = asyncio.create_task(_sample_for_ever(child, drawn))
    figures: dict[str, Any] = {}
    try:
        for level in LEVELS:
            await child.limit_duty(level)
            await asyncio.sleep(SETTLE_S)
            share, tokens_per_s = await _take(child, drawn)
            figures |= {f"share_at_{level:.0%}": share, f"tokens_per_s_at_{level:.0%}": tokens_per_s}
    finally:
        sampling.cancel()
        await asyncio.wait([sampling])
        await child.stop()
    return {**figures, "share_over_level": max(figures[f"share_at_{level:.0%}"] / level for level in LEVELS)}


async def _take(child: EngineChild, drawn: Counter[tuple[int, int]]) -> tuple[float, float]:
    """Measure for `SECONDS` seconds. Return the engine's share of the processor's time, and its tokens per second."""
    process = psutil.Process(child.pid)
    before_s, before, began = processor_s([process]), drawn.total(), time.monotonic()
    await asyncio.sleep(SECONDS)
    passed_s = time.monotonic() - began
    return (processor_s([process]) - before_s) / passed_s / sensible_threads(), (drawn.total() - before) / passed_s


async def _sample_for_ever(child: EngineChild, drawn: Counter[tuple[int, int]]) -> None:
    """Keep `GROUPS` groups in the engine, and count the tokens of each rollout in `drawn`, by lease and index."""
    number, left = 0, 0
    (request,) = texts([TOKENS["levels"]], 1, vocabulary=SMALL.vocabulary)
    while True:
        while left <= (GROUPS - 1) * GROUP_SIZE:
            number, left = number + 1, left + GROUP_SIZE
            await child.submit(replace(request, lease_id=number))
        async for news in child.events():
            if isinstance(news, Finished):
                left -= len(news.rollouts)
                drawn |= {(one.lease_id, one.index): len(one.completion_ids) for one in news.rollouts}
                break
            assert isinstance(news, DrawnTokens), news
            drawn.update({(part.lease_id, part.index): len(part.ids) for part in news.parts})
