"""Speed, memory and agreement of the learner and the sampler on a CUDA GPU, with random weights in real models' shapes.

The benchmark takes six minutes at most, and needs PyTorch, transformers and PEFT; no weights are downloaded. Every part
runs in a separate process with a time limit. If a part fails, only its own row lacks figures, and the row gives the
reason. The part "end to end" runs a hub and a node on the built-in model, or on the model in the directory
ECHO_BENCHMARK_MODEL. Without a GPU, all parts are omitted."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Final

from benchmarks.gpu import end_to_end, running
from benchmarks.gpu.shapes import ON_CPU, SHAPES, device_type
from benchmarks.harness.progress import Measurement, Planned, Progress

DESCRIPTION: Final = "A training step, sampling and adapter swaps on a CUDA GPU, random weights of Qwen3's shapes"

SERVER: Final = running.Server()
"""The process that runs the parts; the first part starts it."""
PARTS: Final = {"learner": 60.0, "sampler": 60.0, "end to end": 75.0, "beside TRL": 90.0}
"""Time limit of each part in seconds, for one shape of model."""
WHOLE_S: Final = 350.0
"""Seconds of all parts together. The last parts get less time, or are skipped."""
LEAST_S: Final = 20.0
"""Minimum seconds in which a part gives useful results; with less time left, the part is skipped."""
SHOWN: Final = (
    "case",
    "tokens_per_s",
    "matmul_share",
    "agreement",
    "time_over_trl",
    "peak_gib",
    "quarantines",
    "error",
)
COMPARED: Final = "Qwen3-0.6B"
"""The only shape that is compared with TRL, because TRL must load its base from a disk."""

CONDITIONS: Final = {
    "learner": "a step of the co-located learner on prepared rollouts, cut by what the learner measured; matmul_share: "
    "operations of its matrix products, forward and backward to the inputs (recomputed layers not counted), over what "
    "a product of 8,192 x 8,192 in bfloat16 reaches on the spot",
    "sampler": "the learner's own sampling: prompts of 32 tokens, completions of 64, groups of 8; "
    "the second time, when the steps are captured as CUDA graphs",
    "share_of_graph_probe": "the sampler's speed over that of a plain step of the same width as a CUDA graph",
    "agreement": "share of drawn tokens that the same weights in float32 draw from the same prefixes and numbers",
    "peak_gib": "most memory that PyTorch allocated, in the process that did the work (beside TRL: on Echo's side)",
    "end to end": "hub and node with default settings on this machine; first_step_s: from the node's start to "
    "the first trained step; learner_waited: share of the time between the first and the last step in which the "
    "learner had no step to train; quarantines: of a node that is honest; as_asked: the node used the GPU",
}


def cases() -> list[tuple[str, str, str]]:
    """Return (name, part, shape) of each case, the most important first, because time may run out."""
    on_cpu = bool(os.environ.get(ON_CPU))
    shapes = [name for name, shape in SHAPES.items() if shape.tiny == on_cpu]
    first, *others = shapes
    found = [("learner", first), ("sampler", first), (end_to_end.PART, end_to_end.model())]
    found += [(part, shape) for shape in others for part in ("learner", "sampler")]
    found += [("beside TRL", shape) for shape in shapes if shape == COMPARED or on_cpu]
    return [(f"{part}, {shape}", part, shape) for part, shape in found]


def plan() -> list[Planned]:
    lacks = "" if device_type() else "there is no GPU that PyTorch can use by CUDA"
    without_trl = lacks or ("" if importlib.util.find_spec("trl") else "TRL is not installed")
    return [
        Planned(name=name, seconds=PARTS[part], lacks=without_trl if part == "beside TRL" else lacks)
        for name, part, _ in cases()
    ]


def measure(seed: int, progress: Progress) -> Measurement:
    rows: list[dict[str, Any]] = []
    with SERVER:
        for name, part, shape in cases():
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
    """Return the figures of each shape, and the number of failed parts."""
    wanted = (
        *("tokens_per_s", "matmul_share", "sampler_tokens_per_s_at_8", "sampler_tokens_per_s_at_256"),
        *("share_of_graph_probe", "agreement", "time_over_trl", "peak_gib"),
        *("first_step_s", "learner_waited", "quarantines", "as_asked"),
    )
    found = {f"{row['case']}: {key}": row[key] for row in rows for key in wanted if key in row}
    return {**found, "failed": sum("error" in row for row in rows)}


def run_part(part: str, shape: str, seed: int, *, limit_s: float) -> dict[str, Any]:
    """Run one part. Return its figures, or the reason for their absence as `error`."""
    if running.CAN_FORK:
        return SERVER.run(part, shape, seed, limit_s=limit_s)
    return running.run_alone(part, shape, seed, limit_s=limit_s)
