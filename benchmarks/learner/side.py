"""A process for one trainer, which makes optimizer steps on request; and Echo's trainer."""

from __future__ import annotations

import gc
import math
import multiprocessing
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
from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import make_optimizer, train_step
from echo_hub.run.base_model import resolve_base
from echo_shared.wire.messages import FinishReason

LEARNING_RATE: Final = 1e-6
"""So small that each step repeats the work of the first step on almost unchanged weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a batch, and options of the computation."""

    name: str
    shape: Shape
    prompt_tokens: int
    longest: int
    """Tokens of the longest completion."""
    spread: int = 8
    """Length of the longest completion over that of the shortest; lengths in between are spread evenly."""
    groups: int = 2
    group_size: int = 8
    micro_batch: int = 8
    """Rollouts in one pass of TRL. A pass of Echo holds as many tokens."""
    precision: Literal["float32", "bfloat16"] = "float32"
    checkpointing: bool = False
    base: str = ""
    """A built-in base of this shape, in place of random weights."""
    steps: int = 4
    """Steps; fewer, but at least two, if they take long."""
    seconds: float
    """Expected seconds of both sides' steps on two cores."""

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch * (self.prompt_tokens + self.longest)

    def lengths(self, seed: int) -> list[int]:
        """Lengths of all completions, in the order of the batch."""
        even = np.linspace(self.longest / self.spread, self.longest, self.groups * self.group_size)
        return [int(length) for length in np.random.default_rng(seed).permutation(even.round())]

    def work(self, seed: int) -> tuple[int, float]:
        """Completion tokens of a step, and operations of its matrix products. Prompts count once for each group."""
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
    """Make random weights, once for each shape; or return the built-in base."""
    if case.base:
        return resolve_base(case.base)
    directory = scratch / f"{case.shape.hidden}-{case.shape.layers}-{case.shape.vocabulary}"
    return random_model(directory, case.shape, seed, dtype=torch.float32, stop_id=0)


def make_batch(case: Case, seed: int) -> list[TrainingGroup]:
    """Make random tokens. Behavior log-probabilities are near those of random weights, so that some ratios are
    clipped."""
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
    """Fill the adapter with weights that are equal on both sides, and not zero."""
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(parameters):
        values = torch.randn(parameters[name].shape, generator=generator)
        parameters[name].copy_(values.mul_(0.02))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Time of one optimizer step, and its gradient."""

    seconds: float
    gradient: dict[str, NDArray[np.float32]]
    """The clipped gradient by the names in PEFT's files; empty after the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Memory of the process, and speed of its device."""

    peak_bytes: int
    """Peak memory of the steps (`benchmarks.learner.CONDITIONS`)."""
    whole_peak_bytes: int
    """Peak memory of the process, model included."""
    operations_per_s: float
    """Operations a second of a large matrix product, in the case's precision."""


class Side:
    """Context manager of the process. `name` is `trl` or `echo`."""

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

    def machine(self) -> Machine:
        machine: Machine = self._ask("machine")
        return machine

    def _ask(self, question: str) -> Any:
        try:
            self._pipe.send(question)
            return self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"the {self._name} side died; see its output above") from error


# The rest runs in the child.


def _run(name: str, case: Case, base: Path, seed: int, pipe: Connection) -> None:
    if name == "trl":
        from benchmarks.learner.trl_side import run
    else:
        run = run_echo
    run(case, base, seed, Questions(pipe, case))


class Questions:
    """Answers to the parent process. A side calls `started` once, then `wait` before and `done` after each step."""

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
        """Wait for a request; return True if it is one for another step."""
        try:
            while self._pipe.recv() != "step":
                self._pipe.send(self._machine())
        except EOFError:
            return False
        synchronize()
        self._began = time.perf_counter()
        return True

    def _machine(self) -> Machine:
        peak = _memory_bytes(peak=True)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Machine(
            peak_bytes=peak - self._baseline,
            whole_peak_bytes=peak,
            operations_per_s=matrix_operations_per_s(device, self._dtype),
        )

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
    """Return the settings of Echo's learner."""
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
