"""Comparison of all sampling engines: speed relative to a ceiling, agreement with a reference, changes of adapter,
shared prompts, two processes over RPC, and the draw of tokens.

Each engine runs in its own process. At each width (rollouts at the same time) the benchmark measures the engines in
turn, within seconds, because the machine's speed may change from one minute to the next. Tokens are completion tokens;
times include the prefill of prompts. The ceiling is the speed of the engine's calls into llama.cpp without the engine's
own work or, for torch, the speed of transformers' `model.generate`.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.backends import drawing, parts, speed
from benchmarks.harness.models import LORA_RANK, QWEN3_06B, random_model
from benchmarks.harness.progress import Measurement, Planned, Progress
from echo_hub.run.base_files import resolve_base
from echo_node.host import hardware

DESCRIPTION: Final = "Sampling engines on a tiny trained and a mid-size random model, side by side on this machine"


def plan() -> list[Planned]:
    return [*speed.plan(), *parts.plan(), *drawing.plan()]


def measure(seed: int, progress: Progress) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="echo-backends-") as directory:
        scratch = Path(directory)

        def mid() -> Path:
            return random_model(scratch / "mid-base", QWEN3_06B, seed)

        fast = speed.measure(speed.TINY, lambda: resolve_base("builtin:tiny"), scratch, progress, seed=seed)
        fast += speed.measure(speed.MID, mid, scratch, progress, seed=seed)
        bench = parts.Bench(scratch, mid, progress, seed)
        others: list[dict[str, Any]] = [row for part in parts.ALL for row in part(bench)]
    drawn = drawing.measure(progress, seed)
    return Measurement(
        headline={**speed.headline(fast), **parts.headline(others), **drawing.headline(drawn)},
        rows=[*fast, *others, *drawn],
        conditions={"threads": hardware.sensible_threads(), "mid": asdict(QWEN3_06B), "lora_rank": LORA_RANK},
    )
