"""A process for one trainer, which makes optimizer steps on request."""

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

from benchmarks.harness.torch_timing import matrix_operations_per_s, synchronize
from benchmarks.learner.cases import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Time and results of one optimizer step."""

    seconds: float
    loss: float
    gradient: dict[str, NDArray[np.float32]]
    """The clipped gradient by the names in PEFT's files; empty after the first step."""


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

    def peak_bytes(self) -> int:
        """Peak memory of the steps (`benchmarks.learner.CONDITIONS`)."""
        peak: int = self._ask("peak")
        return peak

    def whole_peak_bytes(self) -> int:
        """Peak memory of the process, model included."""
        peak: int = self._ask("whole peak")
        return peak

    def matrix_operations_per_s(self) -> float:
        """Operations a second of a large matrix product on this device, in the case's precision."""
        speed: float = self._ask("speed")
        return speed

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
        from benchmarks.learner.echo_side import run
    run(case, base, seed, Questions(pipe, case))


class Questions:
    """Answers to the parent process. A side calls `started` once, then `wait` before and `done` after each step."""

    def __init__(self, pipe: Connection, case: Case) -> None:
        self._pipe = pipe
        self._dtype = torch.bfloat16 if case.precision == "bfloat16" else torch.float32
        self._baseline = 0
        self._began = 0.0
        self._steps = 0

    def started(self) -> None:
        gc.collect()
        self._baseline = _memory_bytes(peak=False)
        _reset_peak()

    def wait(self) -> bool:
        """Wait for a request; return True if it is one for another step."""
        try:
            while (question := self._pipe.recv()) != "step":
                self._pipe.send(self._answer(question))
        except EOFError:
            return False
        synchronize()
        self._began = time.perf_counter()
        return True

    def _answer(self, question: str) -> float:
        if question == "speed":
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            return matrix_operations_per_s(device, self._dtype)
        peak = _memory_bytes(peak=True)
        return peak if question == "whole peak" else peak - self._baseline

    def done(self, loss: Callable[[], float], gradient: Callable[[], dict[str, NDArray[np.float32]]]) -> None:
        synchronize()
        seconds = time.perf_counter() - self._began
        self._steps += 1
        step = Step(
            seconds=seconds,
            loss=loss(),
            gradient=gradient() if self._steps == 1 else {},
        )
        self._pipe.send(step)


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
        # Sets VmHWM to the resident memory (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")
