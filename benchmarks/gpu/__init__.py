"""The learner and the sampler on a CUDA GPU, with random weights of real models' shapes: speed, memory, agreement.

Eight minutes at most, on a machine with PyTorch, transformers and PEFT; no weights are downloaded, and no server runs.
Every part has a process of its own with a time limit: one that fails costs its own row, which says why. Without a GPU
all is left out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any, Final

from benchmarks.gpu.shapes import ON_CPU, SHAPES, device_type
from benchmarks.measurement import Measurement
from benchmarks.progress import Planned, Progress

DESCRIPTION: Final = "A training step, sampling and adapter swaps on a CUDA GPU, random weights of Qwen3's shapes"

PARTS: Final = {"learner": 75.0, "sampler": 75.0, "beside TRL": 90.0}
"""The seconds that each may take, for one shape."""
COMPARED: Final = "Qwen3-0.6B"
"""The shape of the comparison: TRL wants its base on a disk."""

CONDITIONS: Final = {
    "learner": "a step of the co-located learner on prepared rollouts, cut by what the learner measured; matmul_share: "
    "operations of its matrix products, forward and backward to the inputs (recomputed layers not counted), over what "
    "a product of 8,192 x 8,192 in bfloat16 reaches on the spot",
    "sampler": "the learner's own sampling: prompts of 32 tokens, completions of 64, groups of 8",
    "agreement": "share of drawn tokens that the same weights in float32 draw from the same prefixes and numbers",
    "peak_gib": "most memory that PyTorch allocated",
}


def cases() -> list[tuple[str, str, str]]:
    """Name, part and shape of each case."""
    on_cpu = bool(os.environ.get(ON_CPU))
    shapes = [name for name, shape in SHAPES.items() if shape.tiny == on_cpu]
    compared = [shape for shape in shapes if shape == COMPARED or on_cpu]
    found = [(part, shape) for shape in shapes for part in PARTS if part != "beside TRL" or shape in compared]
    return [(f"{part}, {shape}", part, shape) for part, shape in found]


def plan() -> list[Planned]:
    lacks = "" if device_type() else "there is no GPU that PyTorch can use by CUDA"
    without_trl = lacks or ("" if importlib.util.find_spec("trl") else "TRL is not installed")
    return [
        Planned(name=name, seconds=PARTS[part], lacks=without_trl if part == "beside TRL" else lacks)
        for name, part, _ in cases()
    ]


def measure(seed: int, progress: Progress) -> Measurement:
    rows = []
    for name, part, shape in cases():
        if progress.wants(name):
            row = {"case": name, **run_part(part, shape, seed, limit_s=PARTS[part])}
            rows.append(row)
            progress.done(name, {key: value for key, value in row.items() if key not in ("case", "device")})
            progress.so_far = Measurement(headline=headline(rows), rows=rows, conditions=CONDITIONS)
    return Measurement(headline=headline(rows), rows=rows, conditions=CONDITIONS)


def headline(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shape by shape, and how many parts have failed."""
    wanted = ("tokens_per_s", "matmul_share", "tokens_per_s_at_256", "agreement", "time_ratio")
    found = {f"{row['case']}: {key}": row[key] for row in rows for key in wanted if key in row}
    return {**found, "failed": sum("error" in row for row in rows)}


def run_part(part: str, shape: str, seed: int, *, limit_s: float) -> dict[str, Any]:
    """The figures of one part, or `error`: why there are none."""
    command = [sys.executable, "-m", "benchmarks.gpu.part", part, shape, str(seed)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {limit_s:.0f} s"}
    lines = run.stdout.splitlines()
    if run.returncode or not lines:
        said = run.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        return {"error": f"ended with status {run.returncode}: {said[0][:300]}"}
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures
