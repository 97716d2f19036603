"""Completion tokens per second by engine, precision and width (rollouts at the same time), compared with the engine's
ceiling.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from benchmarks.harness.engine import GROUP_SIZE, SamplingEngine, lacks, sums, texts
from benchmarks.harness.models import QWEN3_06B
from benchmarks.harness.pool import apart
from benchmarks.harness.progress import Planned, Progress
from echo_node.host import hardware
from echo_shared.sampling.interface import GroupRequest

WIDTHS: Final = (1, 8, 32, 64)
TURNS_S: Final = 180.0
"""Seconds of measurement after which a width (rollouts at the same time) gets no further repetition."""
TINY_GROUPS: Final = 96
MID_LENGTHS: Final = (4, 12)
"""Tokens of the shortest and the longest completion of the mid-size model. So the rollouts of a batch end at different
times, as in a run.
"""
BESIDE_TORCH: Final = ("f32", "bf16")
"""Precisions of the torch engine for which transformers' `model.generate` is measured as the ceiling."""

Rows = list[dict[str, Any]]


def of_tiny(width: int, seed: int) -> list[GroupRequest]:
    return sums(TINY_GROUPS, seed, group_size=min(width, GROUP_SIZE))


def of_mid(width: int, seed: int) -> list[GroupRequest]:
    size = min(width + 1, GROUP_SIZE)
    lengths = np.random.default_rng(seed).integers(*MID_LENGTHS, -(-3 * width // 2 // size), endpoint=True).tolist()
    return texts(lengths, seed, vocabulary=QWEN3_06B.vocabulary, group_size=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One of the benchmark's models, and the engines whose speed is measured with it."""

    name: str
    engines: tuple[tuple[str, str], ...]
    workload: Callable[[int, int], list[GroupRequest]]
    repetitions: Mapping[int, int]
    """Number of repetitions by width (rollouts at the same time). A width that gives a main figure has more
    repetitions.
    """
    seconds: Mapping[int, float]

    def case(self, engine: tuple[str, str], width: int) -> str:
        return f"speed, {self.name}, {engine[0]} {engine[1]}, width {width}"


TINY: Final = Subject(
    name="tiny",
    engines=(("llama_cpp", "f32"), ("torch", "f32"), ("mlx", "f32")),
    workload=of_tiny,
    repetitions={1: 3, 8: 3, 32: 7, 64: 3},
    seconds=dict.fromkeys(WIDTHS, 6.0),
)
MID: Final = Subject(
    name="mid",
    engines=(("llama_cpp", "f32"), ("llama_cpp", "q8_0"), ("torch", "f32"), ("torch", "bf16")),
    workload=of_mid,
    repetitions={1: 1, 8: 2, 32: 2, 64: 1},
    seconds={1: 12.0, 8: 15.0, 32: 35.0, 64: 45.0},
)


def plan() -> list[Planned]:
    return [
        Planned(name=subject.case(engine, width), seconds=subject.seconds[width], lacks=lacks(*engine))
        for subject in (TINY, MID)
        for width in WIDTHS
        for engine in subject.engines
    ]


def measure(subject: Subject, base: Callable[[], Path], scratch: Path, progress: Progress, *, seed: int) -> Rows:
    """Measure the wanted engines at each width (rollouts at the same time). `base` makes the model on first use."""
    rows: Rows = []
    wanted = {
        width: [engine for engine in subject.engines if progress.wants(subject.case(engine, width))] for width in WIDTHS
    }
    engines = [engine for engine in subject.engines if any(engine in at_width for at_width in wanted.values())]
    with ExitStack() as stack:
        processes = {
            engine: stack.enter_context(apart(SamplingEngine, engine[0], base(), scratch / subject.name, engine[1]))
            for engine in engines
        }
        generate = {
            precision: stack.enter_context(apart(Generate, base(), precision))
            for precision in BESIDE_TORCH
            if ("torch", precision) in engines
        }
        for width, at_width in wanted.items():
            chosen = {engine: processes[engine] for engine in at_width}
            for process in chosen.values():
                process.open(width=width)
            groups = subject.workload(width, seed)
            found = _take_turns(chosen, generate, groups, width, subject.repetitions[width], progress)
            for engine, figures in found.items():
                progress.done(subject.case(engine, width), figures)
                about = {"part": "speed", "model": subject.name, "backend": engine[0], "precision": engine[1]}
                rows.append({**about, "width": width, **figures})
    return rows


def _take_turns(
    processes: Mapping[tuple[str, str], SamplingEngine],
    generate: Mapping[str, Generate],
    groups: list[GroupRequest],
    width: int,
    most: int,
    progress: Progress,
) -> dict[tuple[str, str], dict[str, Any]]:
    """Sample the groups with each engine in turn, repeatedly.

    Before each run of an engine, its ceiling is measured: the bare calls into llama.cpp, or `model.generate` for torch.
    `over_ceiling` is the median of the engine's speed over the ceiling's.
    """
    speeds: dict[tuple[str, str], list[float]] = {engine: [] for engine in processes}
    ratios: dict[tuple[str, str], list[float]] = {engine: [] for engine in processes}
    for (backend, _), process in processes.items():  # Record calls for `replay`. Both calls also warm the engine up.
        process.record(groups) if backend == "llama_cpp" else process.sample(groups[:1])
    for _ in progress.repetitions(most, within_s=TURNS_S):
        for engine, process in processes.items():
            backend, precision = engine
            ceiling_s = process.replay() if backend == "llama_cpp" else 0.0
            ceiling_per_s = generate[precision].sample(groups, width) if backend == "torch" else 0.0
            run = process.sample(groups)
            if ceiling_s:
                ratios[engine].append(ceiling_s / run.seconds)
            elif ceiling_per_s:
                ratios[engine].append(run.tokens_per_s / ceiling_per_s)
            speeds[engine].append(run.tokens_per_s)
    return {
        engine: {
            "tokens_per_s": statistics.median(found),
            "over_ceiling": statistics.median(ratios[engine]) if ratios[engine] else None,
            "runs": len(found),
        }
        for engine, found in speeds.items()
    }


_DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16}


class Generate:
    """Measures the speed of transformers' `model.generate`, with which the torch engine is compared (its ceiling)."""

    def __init__(self, base: Path, precision: str) -> None:
        torch.set_num_threads(hardware.sensible_threads())
        self._model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=_DTYPES[precision]).eval()

    def sample(self, groups: list[GroupRequest], width: int) -> float:
        """Sample all rollouts, `width` at a time. Return tokens per second, not counting tokens after a rollout's
        end.
        """
        rows = [group for group in groups for _ in group.indices]
        torch.manual_seed(groups[0].seed % 2**31)
        began = time.perf_counter()
        tokens = sum(self.generate(rows[start : start + width]) for start in range(0, len(rows), width))
        return tokens / (time.perf_counter() - began)

    def generate(self, rows: list[GroupRequest]) -> int:
        """Generate one batch, padded on the left, until its longest rollout ends. Return the number of tokens up to
        each rollout's own end.
        """
        longest = max(len(row.prompt_ids) for row in rows)
        ids, mask = np.zeros((2, len(rows), longest), np.int64)
        for number, row in enumerate(rows):
            ids[number, longest - len(row.prompt_ids) :] = row.prompt_ids
            mask[number, longest - len(row.prompt_ids) :] = 1
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=torch.from_numpy(ids),
                attention_mask=torch.from_numpy(mask),
                do_sample=True,
                temperature=rows[0].temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(row.max_tokens for row in rows),
                eos_token_id=list(rows[0].stop_ids) or None,
                pad_token_id=0,
            )
        completions = output[:, longest:].numpy()
        return sum(_useful(completion, row) for completion, row in zip(completions, rows, strict=True))


def _useful(completion: NDArray[np.int64], row: GroupRequest) -> int:
    """Return the number of tokens up to the rollout's end; padding after it does not count."""
    stops = np.flatnonzero(np.isin(completion, row.stop_ids))
    end = int(stops[0]) + 1 if len(stops) else len(completion)
    return min(end, row.max_tokens)


def headline(rows: Rows) -> dict[str, float | None]:
    cells = {(row["model"], row["backend"], row["precision"], row["width"]): row for row in rows}

    def over_ceiling(model: str, backend: str, precision: str) -> float | None:
        row = cells.get((model, backend, precision, 32))
        return row["over_ceiling"] if row else None

    def over_torch(precision: str, of_torch: str, width: int) -> float | None:
        one, other = cells.get(("mid", "llama_cpp", precision, width)), cells.get(("mid", "torch", of_torch, width))
        return one["tokens_per_s"] / other["tokens_per_s"] if one and other else None

    return {
        "llama_cpp_over_ceiling_32_tiny": over_ceiling("tiny", "llama_cpp", "f32"),
        "llama_cpp_over_ceiling_32": over_ceiling("mid", "llama_cpp", "f32"),
        "torch_over_generate_32": _least(over_ceiling("mid", "torch", precision) for precision in BESIDE_TORCH),
        "llama_cpp_f32_over_torch_f32_8": over_torch("f32", "f32", 8),
        "llama_cpp_q8_0_over_torch_bf16": _least(over_torch("q8_0", "bf16", width) for width in WIDTHS),
    }


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)
