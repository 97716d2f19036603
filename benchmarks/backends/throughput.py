"""Completion tokens a second, by engine, precision and width, compared with each engine's ceiling."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.backends import cases
from benchmarks.backends.engine_process import EngineProcess, Run
from benchmarks.backends.generate import GenerateProcess
from benchmarks.backends.models import GROUP_SIZE, Models, sums, texts
from benchmarks.harness.progress import Planned, Progress
from echo_shared.sampling import GroupRequest

WIDTHS: Final = (1, 8, 32, 64)
TINY_REPETITIONS: Final = {1: 3, 8: 3, 32: 7, 64: 3}
MID_REPETITIONS: Final = {1: 1, 8: 2, 32: 2, 64: 1}
"""Repetitions by width; more where a headline figure needs them."""
TURNS_S: Final = 180.0
"""Time after which the engines at a width make no further turns."""
TINY_S: Final = 6.0
MID_S: Final = {1: 12.0, 8: 15.0, 32: 35.0, 64: 45.0}
"""Expected time of one engine, by width."""
TINY_ENGINES: Final = (("llama_cpp", "f32"), ("torch", "f32"), ("mlx", "f32"))
MID_ENGINES: Final = (("llama_cpp", "f32"), ("llama_cpp", "q8_0"), ("torch", "f32"), ("torch", "bf16"))
GENERATE: Final = ("f32", "bf16")
TINY_GROUPS: Final = 96
MID_LENGTHS: Final = (4, 12)
"""Shortest and longest completion, so that the rollouts of a batch end at different times."""

Workload = Callable[[int], list[GroupRequest]]
"""Makes the groups for a width."""


@dataclass(slots=True, kw_only=True)
class Cell:
    """One engine at one width. `ceilings` and `generate` are measured next to each run."""

    backend: str
    precision: str
    width: int
    runs: list[Run] = field(default_factory=list)
    ceilings: list[float] = field(default_factory=list)
    """Seconds of llama.cpp's bare calls."""
    generate: list[float] = field(default_factory=list)
    """Tokens a second of model.generate, next to torch."""

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(run.tokens_per_s for run in self.runs)

    @property
    def over_ceiling(self) -> float | None:
        """Median ratio of runs that were measured next to each other."""
        if self.ceilings:
            return statistics.median(c / run.seconds for c, run in zip(self.ceilings, self.runs, strict=True))
        if self.generate:
            return statistics.median(r.tokens_per_s / g for g, r in zip(self.generate, self.runs, strict=True))
        return None


Cells = dict[tuple[str, str, int], Cell]
"""By backend, precision and width."""
Figures = tuple[dict[str, Any], list[dict[str, Any]]]
"""Headline figures, and rows."""


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
    """A model, and its engines."""

    name: str
    base: Callable[[], Path]
    derived: Path
    engines: tuple[tuple[str, str], ...]
    """(backend, precision)"""
    baselines: tuple[str, ...]
    """Precisions of model.generate."""
    workload: Workload
    repetitions: Mapping[int, int]
    """By width."""


def plan() -> list[Planned]:
    return [
        Planned(name=cases.speed(model, *engine, width), seconds=seconds[width], lacks=cases.lacks(*engine))
        for model, engines, seconds in (
            ("tiny", TINY_ENGINES, dict.fromkeys(WIDTHS, TINY_S)),
            ("mid", MID_ENGINES, MID_S),
        )
        for width in WIDTHS
        for engine in engines
    ]


def on_tiny(models: Models, scratch: Path, progress: Progress, *, seed: int, threads: int) -> Figures:
    subject = Subject(
        name="tiny",
        base=lambda: models.tiny,
        derived=scratch / "tiny",
        engines=TINY_ENGINES,
        baselines=("f32",),
        workload=tiny_workload(seed),
        repetitions=TINY_REPETITIONS,
    )
    cells = _measure(subject, threads, progress)
    return {"llama_cpp_over_ceiling_32_tiny": _over_ceiling(cells, "llama_cpp", "f32")}, _rows(subject, cells)


def on_mid(models: Models, scratch: Path, progress: Progress, *, seed: int, threads: int) -> Figures:
    subject = Subject(
        name="mid",
        base=lambda: models.mid,
        derived=scratch / "mid-gguf",
        engines=MID_ENGINES,
        baselines=GENERATE,
        workload=mid_workload(seed),
        repetitions=MID_REPETITIONS,
    )
    cells = _measure(subject, threads, progress)

    def ratio(of: str, to: str, width: int) -> float | None:
        one, other = cells.get(("llama_cpp", of, width)), cells.get(("torch", to, width))
        return one.tokens_per_s / other.tokens_per_s if one and other else None

    headline = {
        "llama_cpp_over_ceiling_32": _over_ceiling(cells, "llama_cpp", "f32"),
        "torch_over_generate_32": _least(_over_ceiling(cells, "torch", precision) for precision in GENERATE),
        "llama_cpp_f32_over_torch_f32_8": ratio("f32", "f32", 8),
        "llama_cpp_q8_0_over_torch_bf16": _least(ratio("q8_0", "bf16", width) for width in WIDTHS),
    }
    return headline, _rows(subject, cells)


def _over_ceiling(cells: Cells, backend: str, precision: str) -> float | None:
    cell = cells.get((backend, precision, 32))
    return cell.over_ceiling if cell else None


def _least(values: Iterable[float | None]) -> float | None:
    """Return the least of the measured values."""
    return min((value for value in values if value is not None), default=None)


def _measure(subject: Subject, threads: int, progress: Progress) -> Cells:
    found: Cells = {}
    wanted = {
        width: [engine for engine in subject.engines if progress.wants(cases.speed(subject.name, *engine, width))]
        for width in WIDTHS
    }
    engines = [engine for engine in subject.engines if any(engine in at_width for at_width in wanted.values())]
    with ExitStack() as stack:
        generate = {
            precision: stack.enter_context(GenerateProcess(subject.base(), precision, threads))
            for precision in subject.baselines
            if ("torch", precision) in engines
        }
        processes = {
            engine: stack.enter_context(EngineProcess(engine[0], subject.base(), subject.derived, engine[1]))
            for engine in engines
        }
        for width, at_width in wanted.items():
            for engine in at_width:
                processes[engine].open(width=width, threads=threads)
            turns = _take_turns(subject, [processes[engine] for engine in at_width], generate, width, progress)
            for engine, cell in zip(at_width, turns, strict=True):
                found[*engine, width] = cell
                figures = {"tokens_per_s": cell.tokens_per_s, "over_ceiling": cell.over_ceiling, "runs": len(cell.runs)}
                progress.done(cases.speed(subject.name, *engine, width), figures)
    return found


def _take_turns(
    subject: Subject,
    processes: list[EngineProcess],
    generate: dict[str, GenerateProcess],
    width: int,
    progress: Progress,
) -> list[Cell]:
    groups = subject.workload(width)
    cells = [Cell(backend=process.backend, precision=process.precision, width=width) for process in processes]
    for process in processes:  # Recording warms the engine up, too.
        process.record(groups) if process.backend == "llama_cpp" else process.sample(groups[:1])
    for _ in progress.repetitions(subject.repetitions[width], within_s=TURNS_S):
        for process, cell in zip(processes, cells, strict=True):
            if process.backend == "llama_cpp":
                cell.ceilings.append(process.replay())
            if process.backend == "torch":
                seconds, tokens = generate[process.precision].sample(groups, width)
                cell.generate.append(tokens / seconds)
            cell.runs.append(process.sample(groups))
    return cells


def _rows(subject: Subject, cells: Cells) -> list[dict[str, Any]]:
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
                "runs": len(cell.runs),
                "tokens_per_s": cell.tokens_per_s,
                "ceiling_tokens_per_s": statistics.median(ceilings or cell.generate) if cell.over_ceiling else None,
                "over_ceiling": cell.over_ceiling,
            }
        )
    return rows
