"""Cost of the cage (the engine's sandbox): caged and uncaged engines take turns on equal models and equal work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.engine import GROUP_SIZE, texts
from benchmarks.harness.models import SMALL
from benchmarks.harness.progress import Progress
from benchmarks.manners.scene import Engine, Models
from echo_node.backends.base import EngineSettings
from echo_node.backends.caging import CageTerms
from echo_node.backends.process import EngineChild, Finished
from echo_node.backends.registry import BackendChoice
from echo_node.host import hardware
from echo_node.host.cage.description import CageMode
from echo_shared.process.supervised import ChildLimits

TOKENS: Final = 96
PAIRS: Final = 40
WITHIN_S: Final = 120.0
LEAST: Final = 8
MODES: Final[tuple[CageMode, ...]] = ("required", "off")


async def measure(scratch: Path, models: Models, engine: Engine, progress: Progress) -> Mapping[str, Any]:
    """Compare tokens per second with and without the cage: the median over pairs, whose order alternates."""
    engines = {mode: await _start(mode, scratch, models(engine.model), engine) for mode in MODES}
    took: dict[CageMode, list[float]] = {mode: [] for mode in MODES}
    try:
        for child in engines.values():
            await _turn(child, -1)  # Warms the engine up; this time is not used.
        for number in progress.repetitions(PAIRS, within_s=WITHIN_S, least=LEAST):
            for mode in MODES if number % 2 else MODES[::-1]:
                took[mode].append(await _turn(engines[mode], number))
    finally:
        for child in engines.values():
            await child.stop()
    pairs = list(zip(*(took[mode] for mode in MODES), strict=True))
    return {
        "caged_speed": statistics.median(bare_s / caged_s for caged_s, bare_s in pairs),
        "pairs": len(pairs),
        "held_by": " and ".join(engines["required"].held.by),
    }


async def _start(mode: CageMode, scratch: Path, base: Path, engine: Engine) -> EngineChild:
    return await EngineChild.start(
        BackendChoice(name=engine.backend, device="cpu", reason="benchmark"),
        base_dir=base,
        derived_dir=scratch / mode,
        log=scratch / f"{mode}.log",
        settings=EngineSettings(width=GROUP_SIZE, threads=hardware.sensible_threads()),
        limits=ChildLimits(),
        cage=CageTerms(mode=mode),
    )


async def _turn(child: EngineChild, number: int) -> float:
    """Sample one group; return the seconds. Groups differ only in `number`."""
    (request,) = texts([TOKENS], number + 1, vocabulary=SMALL.vocabulary)
    began = time.monotonic()
    await child.submit(replace(request, lease_id=number + 1))
    left = GROUP_SIZE
    async for news in child.events():
        assert isinstance(news, Finished), news
        left -= len(news.rollouts)
        if not left:
            break
    return time.monotonic() - began
