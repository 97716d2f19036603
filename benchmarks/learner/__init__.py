"""A training step of Echo compared with the same step of TRL's GRPOTrainer: time, peak memory and gradient.

Model, batch, adapter, objective, precision and micro-batch budget are the same, and so are tokens and old
log-probabilities: nothing is sampled. Both sides time a whole optimizer step on prepared completions: forward and
backward passes, gradient clipping, AdamW; Echo's side also packs the batch. TRL pads when it generates, which is not
timed. TRL runs its own `train()`, with the options that make it fastest in the same memory (no gradient checkpointing
where time is measured, fused AdamW, its chunked output layer, which is always on). Each side has a process of its own.
The sides take turns step by step, because the machine may be slower a minute later.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.harness.progress import Measurement, Planned, Progress
from benchmarks.learner.side import CASES, Case, Side, Step, make_model
from echo_shared.sampling.torch_precision import multiplies

DESCRIPTION: Final = "A GRPO step with LoRA on mixed completion lengths, in TRL's GRPOTrainer and here, in turns"

STEPS_S: Final = 120.0
"""Seconds after which a case makes no further steps. Two steps are made in any case."""

TOLD: Final = ("trl_s", "echo_s", "time_ratio", "memory_ratio", "gradient_difference", "steps")

CONDITIONS: Final = {
    "timed": "forward, backward, clipping and AdamW of one step; the packing of the batch too on Echo's side",
    "peak_memory": "largest resident memory of the side's process (on CUDA: allocated) during its steps, over what it "
    "holds after the model is loaded and the trainer built: activations, logits, gradients, optimizer state",
    "gradient_difference": "largest difference in any entry, over the largest entry of TRL's gradient; first step",
    "headline": "the worst of all cases; gradients in float32, of memory with a wide vocabulary or long completions",
}


def plan() -> list[Planned]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lacks = "" if multiplies(device, torch.bfloat16) else "hardware that multiplies bfloat16: training takes hours"
    return [
        Planned(name=case.name, seconds=case.seconds, lacks=lacks if case.precision == "bfloat16" else "")
        for case in CASES
    ]


def measure(seed: int, progress: Progress) -> Measurement:
    if importlib.util.find_spec("trl") is None:
        raise SystemExit("TRL, which the learner is compared with, is not installed. Try: pip install '.[benchmarks]'")
    with tempfile.TemporaryDirectory(prefix="echo-learner-") as directory:
        rows = [compare(case, Path(directory), seed, progress) for case in CASES if progress.wants(case.name)]
    timed = [row["time_ratio"] for row in rows if row["steps"] > 1]
    held = [row["memory_ratio"] for row in rows if row["large_logits"]]
    exact = [row["gradient_difference"] for row in rows if row["precision"] == "float32"]
    return Measurement(
        headline={
            "step_time_over_trl": max(timed, default=None),
            "peak_memory_over_trl": max(held, default=None),
            "max_gradient_difference": max(exact, default=None),
        },
        rows=rows,
        conditions=CONDITIONS,
    )


def compare(case: Case, scratch: Path, seed: int, progress: Progress) -> dict[str, Any]:
    """Compare Echo's step with TRL's, in turns, on the same batch. Returns the case's row."""
    base = make_model(case, scratch, seed)
    with Side("trl", case, base, seed) as trl, Side("echo", case, base, seed) as echo:
        repetitions = progress.repetitions(case.steps, within_s=STEPS_S, least=2)
        pairs = [(trl.step(), echo.step()) for _ in repetitions]
        theirs, ours = trl.machine(), echo.machine()
    # Without the first pair of steps, which also allocate memory: they give the differences, but not the times.
    timed = pairs[1:] or pairs
    seconds = [statistics.median(step.seconds for step in steps) for steps in zip(*timed, strict=True)]
    tokens, operations = case.work(seed)
    row = {
        "case": case.name,
        "precision": case.precision,
        "large_logits": bool(case.base) or case.shape.vocabulary > 100_000,
        "steps": len(pairs),
        "trl_s": seconds[0],
        "echo_s": seconds[1],
        "time_ratio": statistics.median(echo_step.seconds / trl_step.seconds for trl_step, echo_step in timed),
        "memory_ratio": ours.peak_bytes / theirs.peak_bytes,
        "peak_gib": ours.whole_peak_bytes / 2**30,
        "gradient_difference": _difference(*pairs[0]),
        "tokens_per_s": tokens / seconds[1],
        "matmul_share": operations / seconds[1] / ours.operations_per_s,
    }
    progress.done(case.name, {name: row[name] for name in TOLD})
    return row


def _difference(trl: Step, echo: Step) -> float:
    if trl.gradient.keys() != echo.gradient.keys():
        raise RuntimeError("the two sides do not train the same weights")
    largest = max(float(abs(values).max()) for values in trl.gradient.values())
    return max(float(abs(values - echo.gradient[name]).max()) for name, values in trl.gradient.items()) / largest
