"""A process for one trainer, which makes optimizer steps on request; and Echo's trainer."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.models import LORA_RANK, matrix_operations_per_s, synchronize
from benchmarks.learner.cases import LEARNING_RATE, Case, fill_adapter, make_batch
from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.learner.step import make_optimizer, train_step


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
