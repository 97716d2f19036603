"""Comparison of all sampling engines: speed and its ceiling, agreement, adapter swaps, shared prompts, RPC.

Each engine runs in a process of its own. For each width the engines take turns within seconds of each other, because
the machine may be slower a minute later. Tokens are completion tokens; times include the prefill of prompts.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.backends import beyond_speed, throughput
from benchmarks.backends.models import LORA_RANK, MID, Models
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.progress import Planned, Progress
from echo_node.host import hardware

DESCRIPTION: Final = "Sampling engines on a tiny trained and a mid-size random model, side by side on this machine"


def plan() -> list[Planned]:
    return [*throughput.plan(), *beyond_speed.plan()]


def measure(seed: int, progress: Progress) -> Measurement:
    threads = hardware.sensible_threads()
    with tempfile.TemporaryDirectory(prefix="echo-backends-") as directory:
        scratch = Path(directory)
        models = Models(scratch, seed)
        rows: list[dict[str, Any]] = []
        headline: dict[str, Any] = {}
        for part in beyond_speed.ALL:
            figures, part_rows = part(models, scratch, progress, seed=seed, threads=threads)
            headline |= figures
            rows += part_rows
    return Measurement(
        headline=headline, rows=rows, conditions={"threads": threads, "mid": MID, "lora_rank": LORA_RANK}
    )
