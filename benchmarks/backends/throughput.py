"""Completion tokens a second, by engine, precision and width, against each engine's own ceiling."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.backends.engine_process import EngineProcess, Run
from benchmarks.backends.generate import GenerateProcess
from benchmarks.backends.models import GROUP_SIZE, Models, sums, texts
from echo_shared.sampling import GroupRequest

WIDTHS: Final = (1, 8, 32, 64)
TINY_REPETITIONS: Final = {1: 3, 8: 3, 32: 7, 64: 3}
MID_REPETITIONS: Final = {1: 1, 8: 2, 32: 2, 64: 1}
"""By width; more where a headline comes from."""
TINY_ENGINES: Final = (("llama_cpp", "f32"), ("torch", "f32"), ("mlx", "f32"))
MID_ENGINES: Final = (("llama_cpp", "f32"), ("llama_cpp", "q8_0"), ("torch", "f32"), ("torch", "bf16"))
GENERATE: Final = ("f32", "bf16")
TINY_GROUPS: Final = 96
MID_LENGTHS: Final = (4, 12)
"""Shortest and longest completion: a batch of rollouts never ends all at once."""

Workload = Callable[[int], list[GroupRequest]]
"""The groups for a width."""


@dataclass(slots=True, kw_only=True)
class Cell:
    """One engine at one width. `ceilings` and `generate` hold what was measured next to each run."""

    backend: str
    precision: str
    width: int
    runs: list[Run] = field(default_factory=list)
    ceilings: list[float] = field(default_factory=list)
    """Seconds of the bare calls, for llama.cpp."""
    generate: list[float] = field(default_factory=list)
    """Tokens a second of model.generate, for torch."""

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(run.tokens_per_s for run in self.runs)

    @property
    def over_ceiling(self) -> float | None:
        """Median of the ratios of runs that stood next to each other."""
        if self.ceilings:
            return statistics.median(c / run.seconds for c, run in zip(self.ceilings, self.runs, strict=True))
        if self.generate:
            return statistics.median(r.tokens_per_s / g for g, r in zip(self.generate, self.runs, strict=True))
        return None


def tiny_workload(seed: int) -> Workload:
    def groups(width: int) -> list[GroupRequest]:
        size = min(width, GROUP_SIZE)
        return sums(TINY_GROUPS, seed, group_size=size)

    return groups


def mid_workload(seed: int) -> Workload:
    def groups(width: int) -> list[GroupRequest]:
        size = min(width + 1, GROUP_SIZE)
        count = -(-3 * width // 2 // size)
        lengths = np.random.default_rng(seed).integers(*MID_LENGTHS, count, endpoint=True).tolist()
        return texts(lengths, seed, group_size=size)

    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, and who samples it."""

    name: str
    base: Path
    derived: Path
    engines: tuple[tuple[str, str], ...]
    """(backend, precision)"""
    baselines: tuple[str, ...]
    """Precisions of model.generate."""
    workload: Workload
    repetitions: Mapping[int, int]
    """By width."""


def on_tiny(models: Models, scratch: Path, *, seed: int, threads: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    subject = Subject(
        name="tiny",
        base=models.tiny,
        derived=scratch / "tiny",
        engines=TINY_ENGINES,
        baselines=("f32",),
        workload=tiny_workload(seed),
        repetitions=TINY_REPETITIONS,
    )
    cells = _measure(subject, threads)
    return {"llama_cpp_over_ceiling_32_tiny": cells["llama_cpp", "f32", 32].over_ceiling}, _rows(subject, cells)


def on_mid(models: Models, scratch: Path, *, seed: int, threads: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    subject = Subject(
        name="mid",
        base=models.mid,
        derived=scratch / "mid-gguf",
        engines=MID_ENGINES,
        baselines=GENERATE,
        workload=mid_workload(seed),
        repetitions=MID_REPETITIONS,
    )
    cells = _measure(subject, threads)

    def ratio(of: str, to: str, width: int) -> float:
        return cells["llama_cpp", of, width].tokens_per_s / cells["torch", to, width].tokens_per_s

    over_generate = [cells["torch", precision, 32].over_ceiling for precision in GENERATE]
    headline = {
        "llama_cpp_over_ceiling_32": cells["llama_cpp", "f32", 32].over_ceiling,
        "torch_over_generate_32": min(value for value in over_generate if value is not None),
        "llama_cpp_f32_over_torch_f32_8": ratio("f32", "f32", 8),
        "llama_cpp_q8_0_over_torch_bf16": min(ratio("q8_0", "bf16", width) for width in WIDTHS),
    }
    return headline, _rows(subject, cells)


def _measure(subject: Subject, threads: int) -> dict[tuple[str, str, int], Cell]:
    cells = {}
    with ExitStack() as stack:
        generate = {
            precision: stack.enter_context(GenerateProcess(subject.base, precision, threads))
            for precision in subject.baselines
        }
        processes = [
            stack.enter_context(EngineProcess(backend, subject.base, subject.derived, precision))
            for backend, precision in subject.engines
        ]
        for width in WIDTHS:
            for process in processes:
                process.open(width=width, threads=threads)
            for cell in _take_turns(subject, processes, generate, width):
                cells[cell.backend, cell.precision, cell.width] = cell
    return cells


def _take_turns(
    subject: Subject, processes: list[EngineProcess], generate: dict[str, GenerateProcess], width: int
) -> list[Cell]:
    groups = subject.workload(width)
    cells = [Cell(backend=process.backend, precision=process.precision, width=width) for process in processes]
    for process in processes:  # What is recorded warms up as well.
        process.record(groups) if process.backend == "llama_cpp" else process.sample(groups[:1])
    for _ in range(subject.repetitions[width]):
        for process, cell in zip(processes, cells, strict=True):
            if process.backend == "llama_cpp":
                cell.ceilings.append(process.replay())
            if process.backend == "torch":
                seconds, tokens = generate[process.precision].sample(groups, width)
                cell.generate.append(tokens / seconds)
            cell.runs.append(process.sample(groups))
    return cells


def _rows(subject: Subject, cells: dict[tuple[str, str, int], Cell]) -> list[dict[str, Any]]:
    rows = []
    for cell in cells.values():
        ceilings = [run.tokens / seconds for run, seconds in zip(cell.runs, cell.ceilings, strict=False)]
        rows.append(
            {
                "part": "speed",
                "model": subject.name,
                "backend": cell.backend,
                "precision": cell.precision,
                "width": cell.width,
                "tokens_per_s": cell.tokens_per_s,
                "ceiling_tokens_per_s": statistics.median(ceilings or cell.generate) if cell.over_ceiling else None,
                "over_ceiling": cell.over_ceiling,
            }
        )
    return rows
