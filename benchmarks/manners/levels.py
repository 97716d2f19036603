"""Share of the processor's time that an engine takes at a level of the schedule, and its speed at that level."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.harness.engine import GROUP_SIZE, texts
from benchmarks.harness.models import SMALL
from benchmarks.harness.site import processor_s
from benchmarks.manners.scene import Engine, Models
from echo_node.backends.base import EngineSettings
from echo_node.backends.caging import CageTerms
from echo_node.backends.process import DrawnTokens, EngineChild, Finished
from echo_node.backends.registry import BackendChoice
from echo_node.host.hardware import sensible_threads
from echo_shared.process.supervised import ChildLimits

LEVELS: Final = (1.0, 0.5, 0.25)
TOKENS: Final = 32
SETTLE_S: Final = 1.0
SECONDS: Final = 10.0
STREAM_S: Final = 0.2
GROUPS: Final = 2
"""Groups that are queued or sampled at any time."""


async def measure(scratch: Path, models: Models, engine: Engine) -> Mapping[str, Any]:
    """Sample without a break at each level, and measure the engine's processor time and tokens."""
    child = await EngineChild.start(
        BackendChoice(name=engine.backend, device="cpu", reason="benchmark"),
        base_dir=models(engine.model),
        derived_dir=scratch / "derived",
        log=scratch / "engine.log",
        settings=EngineSettings(width=GROUP_SIZE, threads=sensible_threads(), stream_s=STREAM_S),
        limits=ChildLimits(),
        cage=CageTerms(),
    )
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
    """Return the share of the processor's time and the tokens per second of the next `SECONDS` seconds."""
    process = psutil.Process(child.pid)
    before_s, before, began = processor_s([process]), drawn.total(), time.monotonic()
    await asyncio.sleep(SECONDS)
    passed_s = time.monotonic() - began
    return (processor_s([process]) - before_s) / passed_s / sensible_threads(), (drawn.total() - before) / passed_s


async def _sample_for_ever(child: EngineChild, drawn: Counter[tuple[int, int]]) -> None:
    """Keep `GROUPS` groups in the engine, and count the tokens of each rollout in `drawn`, by lease and index."""
    number, left = 0, 0
    (request,) = texts([TOKENS], 1, vocabulary=SMALL.vocabulary)
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
