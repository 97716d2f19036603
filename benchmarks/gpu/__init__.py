"""The learner and the sampler on a CUDA GPU, with random weights of real models' shapes: speed, memory, agreement.

Six minutes at most, on a machine with PyTorch, transformers and PEFT; no weights are downloaded. Every part runs in a
separate process with a time limit: one that fails costs its own row, which says why. The part "end to end" runs a hub
and a node on the built-in model. Without a GPU all is left out."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Final

import torch

from benchmarks.harness.measurement import Measurement
from benchmarks.harness.models import QWEN3_06B, QWEN3_8B, Shape
from benchmarks.harness.progress import Planned, Progress

ON_CPU: Final = "ECHO_BENCHMARK_GPU_ON_CPU"
"""Environment variable: if set, all parts run on the CPU with a tiny shape, for tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A model, and its work."""

    shape: Shape
    completion_tokens: int = 512
    """Tokens of the longest trained rollout."""
    groups: int = 8
    drawn_tokens: int = 64
    widths: tuple[int, ...] = (8, 64, 256)


_TINY: Final = Shape(hidden=64, layers=2, heads=4, key_value_heads=2, head_dim=16, intermediate=64, vocabulary=2_000)
_ON_GPU: Final = {"Qwen3-0.6B": Work(shape=QWEN3_06B), "Qwen3-8B": Work(shape=QWEN3_8B)}
_ON_CPU: Final = {
    "tiny": Work(shape=_TINY, completion_tokens=24, groups=2, drawn_tokens=4, widths=(8, 16)),
}


def works() -> dict[str, Work]:
    """Return the models by name, the most important one first."""
    return _ON_CPU if os.environ.get(ON_CPU) else _ON_GPU


def device_type() -> str:
    """Return the device of the measurement; empty if there is none."""
    if os.environ.get(ON_CPU):
        return "cpu"
    return "cuda" if torch.cuda.is_available() else ""


DESCRIPTION: Final = "A training step, sampling and adapter swaps on a CUDA GPU, random weights of Qwen3's shapes"

PARTS: Final = {"learner": 75.0, "sampler": 75.0, "end to end": 75.0, "beside TRL": 90.0}
"""Limit of each part in seconds, for one shape, with the import of the libraries."""
WHOLE_S: Final = 350.0
"""Limit of all parts together. The last parts get less time, or are skipped."""
LEAST_S: Final = 20.0
"""Shortest useful time of a part."""
END_TO_END: Final = ("end to end", "builtin:tiny")
SHOWN: Final = ("case", "tokens_per_s", "matmul_share", "agreement", "time_ratio", "peak_gib", "quarantines", "error")

CONDITIONS: Final = {
    "learner": "a step of the co-located learner on prepared rollouts, cut by what the learner measured; matmul_share: "
    "operations of its matrix products, forward and backward to the inputs (recomputed layers not counted), over what "
    "a product of 8,192 x 8,192 in bfloat16 reaches on the spot",
    "sampler": "the learner's own sampling: prompts of 32 tokens, completions of 64, groups of 8",
    "agreement": "share of drawn tokens that the same weights in float32 draw from the same prefixes and numbers",
    "peak_gib": "most memory that PyTorch allocated, in the process that did the work (beside TRL: on Echo's side)",
    "end to end": "hub and node with default settings on this machine; seconds_to_first_step: from the node's start to "
    "the first trained step; learner_waited: share of the time between the first and the last step in which the "
    "learner had no step to train; quarantines: of a node that is honest; as_asked: the node used the GPU",
}


def cases() -> list[tuple[str, str]]:
    """Return part and shape of each case, the most important ones first: the last may run out of time."""
    first, *others = works()
    in_order = [("learner", first), ("sampler", first), END_TO_END]
    in_order += [(part, shape) for shape in others for part in ("learner", "sampler")]
    return [*in_order, ("beside TRL", first)]


def name_of(part: str, shape: str) -> str:
    return f"{part}, {shape}"


def plan() -> list[Planned]:
    lacks = "" if device_type() else "there is no GPU that PyTorch can use by CUDA"
    without_trl = lacks or ("" if importlib.util.find_spec("trl") else "TRL is not installed")
    return [
        Planned(name=name_of(part, shape), seconds=PARTS[part], lacks=without_trl if part == "beside TRL" else lacks)
        for part, shape in cases()
    ]


def measure(seed: int, progress: Progress) -> Measurement:
    rows: list[dict[str, Any]] = []
    for part, shape in cases():
        name = name_of(part, shape)
        if not progress.wants(name):
            continue
        limit_s = min(PARTS[part], WHOLE_S - progress.elapsed_s)
        if limit_s < LEAST_S:
            progress.leave_out(name, f"{progress.elapsed_s:.0f} of {WHOLE_S:.0f} s are over")
            continue
        row = {**run_part(part, shape, seed, limit_s=limit_s), "case": name}
        rows.append(row)
        progress.done(name, {key: value for key, value in row.items() if key not in ("case", "device")})
        progress.so_far = _measured(rows)
    return _measured(rows)


def _measured(rows: list[dict[str, Any]]) -> Measurement:
    return Measurement(headline=headline(rows), rows=rows, shown=SHOWN, conditions=CONDITIONS)


def headline(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return figures shape by shape, and the number of failed parts."""
    wanted = (
        *("tokens_per_s", "matmul_share", "tokens_per_s_at_256", "agreement", "time_ratio", "peak_gib"),
        *("seconds_to_first_step", "learner_waited", "quarantines", "as_asked"),
    )
    found = {f"{row['case']}: {key}": row[key] for row in rows for key in wanted if key in row}
    return {**found, "failed": sum("error" in row for row in rows)}


def run_part(
    part: str, shape: str, seed: int, *, limit_s: float, module: str = "benchmarks.gpu.part"
) -> dict[str, Any]:
    """Run one part in a process. Return its figures, or `error`: why there are none."""
    command = [sys.executable, "-m", module, part, shape, str(seed), str(limit_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # The part may have processes of its own.
            return {"error": f"took more than {limit_s:.0f} s"}
    last = output.splitlines()[-1:]
    if process.returncode or not last:
        return {"error": f"ended with status {process.returncode}; its error output says why"}
    figures: dict[str, Any] = json.loads(last[0])
    return figures
