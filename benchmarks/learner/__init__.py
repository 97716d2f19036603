"""A training step of Echo compared with the same step of TRL's GRPOTrainer: time, peak memory and gradient.

Both sides get the same model, batch, adapter, objective, precision and micro-batch budget. Tokens and old
log-probabilities are given, so nothing is sampled. Both sides time a whole optimizer step on prepared completions:
forward and backward passes, gradient clipping, AdamW; Echo's side also packs the batch. TRL pads during generation,
which is not timed. TRL runs its own `train()`, with the options that make it fastest in the same memory (no gradient
checkpointing where time is measured, fused AdamW, its chunked output layer, which is always on). Each side runs in its
own process. The sides take turns step by step, because the machine may be slower a minute later.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.models import LORA_RANK, Shape, matrix_operations_per_s, random_model, synchronize
from benchmarks.harness.progress import Measurement, Planned, Progress
from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import make_optimizer, train_step
from echo_hub.run.base_files import resolve_base
from echo_shared.sampling.torch_precision import multiplies
from echo_shared.wire.messages import FinishReason

DESCRIPTION: Final = "A GRPO step with LoRA on mixed completion lengths, in TRL's GRPOTrainer and here, in turns"

LEARNING_RATE: Final = 1e-6
"""Learning rate, so small that the weights hardly change: each step repeats the work of the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case of the comparison with TRL: a model, a batch, and options of the computation."""

    name: str
    shape: Shape
    prompt_tokens: int
    longest: int
    """Tokens of the longest completion."""
    spread: int = 8
    """Ratio of the longest completion's length to the shortest one's. The lengths between are evenly spread."""
    groups: int = 2
    group_size: int = 8
    micro_batch: int = 8
    """Number of rollouts in one of TRL's passes. Echo's passes hold the same number of tokens."""
    precision: Literal["float32", "bfloat16"] = "float32"
    checkpointing: bool = False
    base: str = ""
    """Name of a built-in base, which must have this shape; with "", the weights are random."""
    steps: int = 4
    seconds: float

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch * (self.prompt_tokens + self.longest)

    def lengths(self, seed: int) -> list[int]:
        even = np.linspace(self.longest / self.spread, self.longest, self.groups * self.group_size)
        return [int(length) for length in np.random.default_rng(seed).permutation(even.round())]

    def work(self, seed: int) -> tuple[int, float]:
        """Return the completion tokens of a step, and the number of operations in its matrix products. A prompt counts
        once per group.
        """
        tokens = sum(self.lengths(seed))
        return tokens, self.shape.operations(tokens + self.groups * self.prompt_tokens, tokens)


def shape_of(hidden: int, layers: int, intermediate: int, vocabulary: int) -> Shape:
    heads = hidden // 64
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_value_heads=max(1, heads // 4),
        head_dim=64,
        intermediate=intermediate,
        vocabulary=vocabulary,
    )


MEDIUM: Final = Case(
    name="100 M parameters", seconds=75, shape=shape_of(768, 12, 2_048, 32_000), prompt_tokens=32, longest=96
)
WIDE: Final = replace(MEDIUM, name="wide vocabulary", shape=shape_of(256, 4, 768, 151_936))
CASES: Final = (
    MEDIUM,
    replace(
        MEDIUM, name="long prompts", seconds=40, shape=shape_of(512, 6, 1_536, 32_000), prompt_tokens=128, longest=64
    ),
    WIDE,
    replace(WIDE, name="wide vocabulary, recomputed layers", seconds=35, checkpointing=True, steps=1),
    replace(MEDIUM, name="100 M parameters, bfloat16", seconds=90, precision="bfloat16"),
    Case(
        name="long completions, the base in the box",
        seconds=40,
        base="builtin:small",
        shape=Shape(hidden=256, layers=4, heads=8, key_value_heads=4, head_dim=32, intermediate=768, vocabulary=389),
        prompt_tokens=16,
        longest=312,
        spread=24,
        groups=4,
    ),
)


def make_model(case: Case, scratch: Path, seed: int) -> Path:
    """Return the built-in base, or a model with random weights, which is made once for each shape."""
    if case.base:
        return resolve_base(case.base)
    directory = scratch / f"{case.shape.hidden}-{case.shape.layers}-{case.shape.vocabulary}"
    return random_model(directory, case.shape, seed, dtype=torch.float32, stop_id=0)


def make_batch(case: Case, seed: int) -> list[TrainingGroup]:
    """Make random tokens. Their behavior log-probabilities are close to those of the random weights, so that some
    ratios are clipped.
    """
    rng, vocabulary = np.random.default_rng([seed, 1]), case.shape.vocabulary
    lengths = iter(case.lengths(seed))
    groups = []
    for _ in range(case.groups):
        rollouts = [
            TrainingRollout(
                completion_ids=rng.integers(1, vocabulary, length).astype(np.int32),
                loss_mask=np.ones(length, dtype=bool),
                behavior_logprobs=rng.normal(-math.log(vocabulary), 0.1, length).astype(np.float32),
                reward=float(rng.random()),
                finish_reason=FinishReason.STOP,
                sampling_s=0.0,
            )
            for length in (next(lengths) for _ in range(case.group_size))
        ]
        prompt = rng.integers(1, vocabulary, case.prompt_tokens).astype(np.int32)
        groups.append(TrainingGroup(prompt_ids=prompt, rollouts=tuple(rollouts)))
    return groups


@torch.no_grad()
def fill_adapter(parameters: Mapping[str, torch.nn.Parameter], seed: int) -> None:
    """Fill the adapter with random weights that are equal on both sides and not zero."""
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(parameters):
        values = torch.randn(parameters[name].shape, generator=generator)
        parameters[name].copy_(values.mul_(0.02))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one of the compared trainers reports about an optimizer step: its time, and its gradient."""

    seconds: float
    gradient: dict[str, NDArray[np.float32]]
    """The clipped gradient, by the weights' names in PEFT's files. Only the first step has it; later ones have {}."""


class Side:
    """Context manager that runs one of the two compared trainers (a "side", `trl` or `echo`) in its own process."""

    def __init__(self, name: str, case: Case, base: Path, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_run, args=(name, case, base, seed, child_pipe), daemon=True)
        self._process.start()
        child_pipe.close()
        self._name = name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pipe.close()
        self._process.join()

    def step(self) -> Step:
        step: Step = self._ask("step")
        return step

    def machine(self) -> dict[str, float]:
        """Return three measurements of this side's process: the peak memory of its steps (defined in `CONDITIONS`) and
        of the whole process in bytes, and the operations per second of a large matrix product in the case's precision.
        """
        machine: dict[str, float] = self._ask("machine")
        return machine

    def _ask(self, question: str) -> Any:
        try:
            self._pipe.send(question)
            return self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"the {self._name} side died; see its output above") from error


# Code from here on runs in the child process.


def _run(name: str, case: Case, base: Path, seed: int, pipe: Connection) -> None:
    if name == "trl":
        from benchmarks.learner.trl_side import run
    else:
        run = run_echo
    run(case, base, seed, Questions(pipe, case))


class Questions:
    """The child's end of the pipe to the parent process. The parent requests each step, and gets its time and gradient.

    A trainer calls `started` once, then `wait` before each step and `done` after it.
    """

    def __init__(self, pipe: Connection, case: Case) -> None:
        self._pipe = pipe
        self._dtype = torch.bfloat16 if case.precision == "bfloat16" else torch.float32
        self._baseline = 0
        self._began = 0.0
        self._is_first = True

    def started(self) -> None:
        gc.collect()
        self._baseline = _memory_bytes(peak=False)
        _reset_peak()

    def wait(self) -> bool:
        """Wait for the parent's next request. Return True if it asks for another step, False to end the training."""
        try:
            while self._pipe.recv() != "step":
                self._pipe.send(self._machine())
        except EOFError:
            return False
        synchronize()
        self._began = time.perf_counter()
        return True

    def _machine(self) -> dict[str, float]:
        peak = _memory_bytes(peak=True)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        operations_per_s = matrix_operations_per_s(device, self._dtype)
        return {"peak": peak - self._baseline, "whole_peak": peak, "operations_per_s": operations_per_s}

    def done(self, gradient: Callable[[], dict[str, NDArray[np.float32]]]) -> None:
        synchronize()
        seconds = time.perf_counter() - self._began
        self._pipe.send(Step(seconds=seconds, gradient=gradient() if self._is_first else {}))
        self._is_first = False


def _memory_bytes(*, peak: bool) -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    wanted = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted))


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        # Reset the process's peak memory (VmHWM) to its resident memory (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")


def settings_of(case: Case, base: Path) -> LearnerSettings:
    return LearnerSettings(
        base_dir=base,
        seed=0,
        temperature=1.0,
        max_tokens=case.longest,
        stop_ids=(0,),
        training=TrainingConfig(lora_rank=LORA_RANK, lora_alpha=2 * LORA_RANK, learning_rate=LEARNING_RATE),
        objective=ObjectiveConfig(name="grpo", aggregation="token_mean", advantage="mean"),
        learner=LearnerConfig(
            precision=case.precision,
            micro_batch_tokens=case.micro_batch_tokens,
            gradient_checkpointing=case.checkpointing,
        ),
    )


def run_echo(case: Case, base: Path, seed: int, questions: Questions) -> None:
    settings = settings_of(case, base)
    policy = Policy.load(settings)
    fill_adapter(policy.parameters, seed)
    optimizer = make_optimizer(policy, settings.training)
    groups = make_batch(case, seed)
    questions.started()
    while questions.wait():
        train_step(policy, optimizer, groups, settings)
        questions.done(
            lambda: {name: weight.grad.cpu().numpy() for name, weight in policy.parameters.items()}  # type: ignore[union-attr]
        )


STEPS_S: Final = 120.0
"""Seconds after which a case makes no further steps; two steps are always made."""

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
    """Compare Echo's training step with TRL's on the same batch, in turns. Return the case's row of the table."""
    base = make_model(case, scratch, seed)
    with Side("trl", case, base, seed) as trl, Side("echo", case, base, seed) as echo:
        repetitions = progress.repetitions(case.steps, within_s=STEPS_S, least=2)
        pairs = [(trl.step(), echo.step()) for _ in repetitions]
        theirs, ours = trl.machine(), echo.machine()
    # Leave the first pair out of the times: its steps also allocate memory.
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
        "memory_ratio": ours["peak"] / theirs["peak"],
        "peak_gib": ours["whole_peak"] / 2**30,
        "gradient_difference": _difference(*pairs[0]),
        "tokens_per_s": tokens / seconds[1],
        "matmul_share": operations / seconds[1] / ours["operations_per_s"],
    }
    progress.done(case.name, {name: row[name] for name in TOLD})
    return row


def _difference(trl: Step, echo: Step) -> float:
    if trl.gradient.keys() != echo.gradient.keys():
        raise RuntimeError("the two sides do not train the same weights")
    largest = max(float(abs(values).max()) for values in trl.gradient.values())
    return max(float(abs(values - echo.gradient[name]).max()) for name, values in trl.gradient.items()) / largest
