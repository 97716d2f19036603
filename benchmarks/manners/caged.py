"""Cost of the cage: caged and uncaged engines take turns on equal models and equal work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from benchmarks.harness.processes import processor_s
from benchmarks.harness.progress import Progress
from benchmarks.harness.requests import group_request
from benchmarks.manners.models import Models
from benchmarks.manners.scene import GROUP_SIZE, PROMPT_TOKENS, Engine
from echo_node.backends.base import EngineSettings
from echo_node.backends.caging import Terms
from echo_node.backends.process import EngineChild, Finished
from echo_node.backends.registry import BackendChoice
from echo_node.host.cage.description import CageMode
from echo_shared.supervised import Limits

TOKENS: Final = 96
"""Tokens of each rollout, which has no earlier end."""
PAIRS: Final = 40
WITHIN_S: Final = 120.0
LEAST: Final = 8
MODES: Final[tuple[CageMode, ...]] = ("required", "off")


async def measure(scratch: Path, models: Models, engine: Engine, progress: Progress) -> Mapping[str, Any]:
    """Compare tokens a second with and without the cage: the median of pairs, whose order alternates.

    `processor_ratio` compares processor time, which other programs disturb less. 1 means no cost.
    """
    engines = {mode: await _start(mode, scratch, models(engine.model), engine) for mode in MODES}
    took: dict[CageMode, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    try:
        for child in engines.values():
            await _turn(child, -1)  # Warm up.
        for number in progress.repetitions(PAIRS, within_s=WITHIN_S, least=LEAST):
            for mode in MODES if number % 2 else MODES[::-1]:
                took[mode].append(await _turn(engines[mode], number))
    finally:
        for child in engines.values():
            await child.stop()
    pairs = list(zip(*(took[mode] for mode in MODES), strict=True))
    speeds = [bare_s / caged_s for (caged_s, _), (bare_s, _) in pairs]
    tokens = GROUP_SIZE * TOKENS
    return {
        "caged_speed": statistics.median(speeds),
        "caged_speed_quartiles": statistics.quantiles(speeds, n=4)[::2],
        "processor_ratio": statistics.median(caged_s / bare_s for (_, caged_s), (_, bare_s) in pairs),
        "caged_tokens_per_s": tokens / statistics.median(seconds for seconds, _ in took["required"]),
        "bare_tokens_per_s": tokens / statistics.median(seconds for seconds, _ in took["off"]),
        "pairs": len(pairs),
        "held_by": " and ".join(engines["required"].held.by),
    }


async def _start(mode: CageMode, scratch: Path, base: Path, engine: Engine) -> EngineChild:
    return await EngineChild.start(
        BackendChoice(name=engine.backend, device="cpu", reason="benchmark"),
        base_dir=base,
        derived_dir=scratch / mode,
        log=scratch / f"{mode}.log",
        settings=EngineSettings(width=GROUP_SIZE, threads=engine.threads),
        limits=Limits(),
        cage=Terms(mode=mode),
    )


async def _turn(child: EngineChild, number: int) -> tuple[float, float]:
    """Sample one group; return seconds and processor seconds. Groups differ only in `number`."""
    request = group_request(
        number + 1,
        np.random.default_rng(number + 1).integers(10, 8_000, PROMPT_TOKENS).astype(np.int32),
        indices=range(GROUP_SIZE),
        seed=number + 1,
        max_tokens=TOKENS,
    )
    process = psutil.Process(child.pid)
    before_s, began = processor_s([process]), time.monotonic()
    await child.submit(request)
    left = GROUP_SIZE
    async for news in child.events():
        assert isinstance(news, Finished), news
        left -= len(news.rollouts)
        if not left:
            break
    return time.monotonic() - began, processor_s([process]) - before_s
