"""What its cage costs an engine: the same engine in it and without it, by turns on one model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.manners.models import Models
from benchmarks.manners.scene import Engine
from benchmarks.progress import Progress
from echo_node.backends.base import EngineSettings
from echo_node.backends.caging import Terms
from echo_node.backends.process import EngineChild
from echo_node.backends.registry import BackendChoice
from echo_node.host.cage.description import CageMode
from echo_shared.supervised import Limits

WIDTH: Final = 8
TURN_S: Final = 3.0
PAIRS: Final = 20
WITHIN_S: Final = 120.0
LEAST: Final = 8
MODES: Final[tuple[CageMode, ...]] = ("required", "off")


async def measure(scratch: Path, models: Models, engine: Engine, progress: Progress) -> Mapping[str, Any]:
    """Drawn tokens a second in the cage over those without; the median of pairs, whose order changes."""
    engines = {mode: await _start(mode, scratch, models(engine.model), engine) for mode in MODES}
    rates: dict[CageMode, list[float]] = {mode: [] for mode in MODES}
    try:
        for number in progress.repetitions(PAIRS, within_s=WITHIN_S, least=LEAST):
            for mode in MODES if number % 2 else reversed(MODES):
                rows = await engines[mode].measure(widths=(WIDTH,), budget_s=TURN_S)
                rates[mode].append(next(row["tokens_per_s"] for row in rows if row["kind"] == "decode"))
    finally:
        for child in engines.values():
            await child.stop()
    ratios = sorted(caged / bare for caged, bare in zip(*(rates[mode] for mode in MODES), strict=True))
    return {
        "caged_speed": statistics.median(ratios),
        "caged_speed_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "caged_tokens_per_s": statistics.median(rates["required"]),
        "bare_tokens_per_s": statistics.median(rates["off"]),
        "pairs": len(ratios),
        "held_by": " and ".join(engines["required"].held.by),
    }


async def _start(mode: CageMode, scratch: Path, base: Path, engine: Engine) -> EngineChild:
    return await EngineChild.start(
        BackendChoice(name=engine.backend, device="cpu", reason="benchmark"),
        base_dir=base,
        derived_dir=scratch / mode,
        log=scratch / f"{mode}.log",
        settings=EngineSettings(width=WIDTH, threads=engine.threads),
        limits=Limits(),
        cage=Terms(mode=mode),
    )
