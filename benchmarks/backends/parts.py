"""All parts of the comparison of engines except speed: agreement with the reference, changes of adapter, shared
prompts, one model in two processes, and engines next to busy programs.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from benchmarks.harness.engine import GROUP_SIZE, Run, SamplingEngine, lacks, sums, texts
from benchmarks.harness.models import QWEN3_06B, random_adapter
from benchmarks.harness.pool import apart
from benchmarks.harness.progress import Planned, Progress, least, most
from echo_hub.run.base_files import resolve_base
from echo_shared.sampling import draws
from echo_shared.sampling.interface import FinishedRollout, GroupRequest

_Pair = tuple[GroupRequest, FinishedRollout]


class Reference:
    """The reference of all engines: transformers and PEFT in float32, with or without an adapter."""

    def __init__(self, base: Path, adapter: Path | None) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if adapter is not None:
            # PEFT takes seconds to load, and engines' processes load this module without needing it.
            from peft import PeftModel

            with warnings.catch_warnings():
                # PEFT reads an attribute that transformers has renamed.
                warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
                model = PeftModel.from_pretrained(model, str(adapter))
        self._model = model.eval()

    def compare(self, groups: list[GroupRequest], rollouts: list[FinishedRollout]) -> tuple[float, float]:
        """Return the share of rollouts whose tokens all equal the reference's, and the largest difference of a token's
        log-probability, in nats.
        """
        by_lease = {group.lease_id: group for group in groups}
        pairs = [(by_lease[rollout.lease_id], rollout) for rollout in rollouts]
        pairs.sort(key=_fed_tokens)
        identical = 0
        differences = []
        for _, same_length in itertools.groupby(pairs, key=_fed_tokens):
            batch = list(same_length)
            for logits, (group, rollout) in zip(self._logits(batch), batch, strict=True):
                tokens, logprobs = _redraw(logits, group, rollout)
                identical += bool((tokens == rollout.completion_ids).all())
                differences.append(np.abs(logprobs - rollout.behavior_logprobs))
        return identical / len(rollouts), float(max(map(np.max, differences)))

    @torch.inference_mode()
    def _logits(self, batch: list[_Pair]) -> NDArray[np.float32]:
        """Return the logits [rollouts, tokens, vocabulary] of a batch. Prompt and completion together must have the
        same length in all its rollouts.
        """
        ids = np.stack([np.concatenate([group.prompt_ids, rollout.completion_ids[:-1]]) for group, rollout in batch])
        logits: NDArray[np.float32] = self._model(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
        return logits


def _fed_tokens(pair: _Pair) -> int:
    group, rollout = pair
    return len(group.prompt_ids) + len(rollout.completion_ids) - 1


def _redraw(
    logits_TV: NDArray[np.float32], group: GroupRequest, rollout: FinishedRollout
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return, for each place in the engine's completion, the token that the reference draws there, and the reference's
    log-probability of the engine's token.
    """
    count = len(rollout.completion_ids)
    logits = logits_TV[-count:]
    tokens, _ = draws.draw(logits, draws.uniforms(group.seed, rollout.index, count), group.temperature)
    scaled = logits.astype(np.float64) / group.temperature
    normalised = scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)
    return tokens, normalised[np.arange(count), rollout.completion_ids]


AGREEMENT: Final = {
    f"agreement, {backend} {precision}": (backend, precision)
    for backend, precisions in (
        ("llama_cpp", ("f32", "f16", "q8_0", "q4_k_m")),
        ("torch", ("f32", "bf16")),
        ("mlx", ("f32", "f16", "q8_0", "q4_0")),
    )
    for precision in precisions
}
AGREEMENT_GROUPS: Final = 128
AGREEMENT_WIDTH: Final = 64
SWAPPED: Final = {
    f"swap, {model}, {backend}": (model, backend)
    for model, backend in (
        *(("tiny", "llama_cpp"), ("tiny", "torch"), ("tiny", "mlx")),
        *(("mid", "llama_cpp"), ("mid", "torch")),
    )
}
SWAPS: Final = {"tiny": 200, "mid": 12}
SHARED: Final = "prefix sharing"
SHARED_PROMPT_TOKENS: Final = 512
SHARED_GROUP: Final = 16
SHARED_TOKENS: Final = 2
SPLIT: Final = "split"
SPLIT_TOKENS: Final = 8
SPLIT_REPETITIONS: Final = 4
SPLIT_S: Final = 120.0
"""Seconds of measurement after which the case `SPLIT` skips its third and fourth repetition."""
BUSY: Final = {f"busy, {backend}": backend for backend in ("llama_cpp", "torch")}
BUSY_GROUPS: Final = 256
BUSY_REPETITIONS: Final = 6
BUSY_S: Final = 60.0
"""Seconds of measurement after which a case of `BUSY` skips its fourth and later repetitions."""
VOCABULARY: Final = QWEN3_06B.vocabulary

Rows = list[dict[str, Any]]


def plan() -> list[Planned]:
    return [
        *(Planned(name=name, seconds=10, lacks=lacks(*engine)) for name, engine in AGREEMENT.items()),
        *(Planned(name=name, seconds=20, lacks=lacks(backend, "f32")) for name, (_, backend) in SWAPPED.items()),
        Planned(name=SHARED, seconds=40, lacks=lacks("llama_cpp", "auto")),
        Planned(name=SPLIT, seconds=40, lacks=lacks("llama_cpp", "f32")),
        *(Planned(name=name, seconds=40, lacks=lacks(backend, "f32")) for name, backend in BUSY.items()),
    ]


class Bench:
    """What all parts of the comparison share: directory, models, seed and progress. `mid` makes the mid-size model at
    its first use.
    """

    def __init__(self, scratch: Path, mid: Any, progress: Progress, seed: int) -> None:
        self.scratch = scratch
        self.progress = progress
        self.seed = seed
        self._mid = mid
        self._adapters: dict[str, tuple[Path, Path]] = {}

    def base(self, model: str) -> Path:
        return resolve_base("builtin:tiny") if model == "tiny" else Path(self._mid())

    def adapters(self, model: str) -> tuple[Path, Path]:
        if model not in self._adapters:
            first, second = (
                random_adapter(self.base(model), self.scratch / f"{model}-adapter" / str(number), self.seed + number)
                for number in range(2)
            )
            self._adapters[model] = first, second
        return self._adapters[model]

    def engine(self, backend: str, model: str, precision: str) -> AbstractContextManager[SamplingEngine]:
        return apart(SamplingEngine, backend, self.base(model), self.scratch / model, precision)


def agreement(bench: Bench) -> Rows:
    """Compare each engine with the reference (transformers and PEFT in float32) on the trained model, with and without
    an adapter.
    """
    rows: Rows = []
    wanted = {name: engine for name, engine in AGREEMENT.items() if bench.progress.wants(name)}
    if not wanted:
        return rows
    groups = sums(AGREEMENT_GROUPS, bench.seed + 1)
    base = bench.base("tiny")
    references = {adapter: Reference(base, adapter) for adapter in (None, bench.adapters("tiny")[0])}
    for name, (backend, precision) in wanted.items():
        found = {}
        with bench.engine(backend, "tiny", precision) as process:
            process.open(width=AGREEMENT_WIDTH)
            for adapter, reference in references.items():
                process.set_policy(adapter)
                model = "tiny" if adapter is None else "tiny + adapter"
                found[model] = reference.compare(groups, process.sample(groups).rollouts)
        about = {"part": "agreement", "backend": backend, "precision": precision}
        rows += [
            {**about, "model": model, "identical": identical, "max_logprob_difference": difference}
            for model, (identical, difference) in found.items()
        ]
        bench.progress.done(name, {f"identical, {model}": identical for model, (identical, _) in found.items()})
    return rows


def swaps(bench: Bench) -> Rows:
    """Switch between two adapters repeatedly, and sample a group with each."""
    rows: Rows = []
    for name, (model, backend) in SWAPPED.items():
        if bench.progress.wants(name):
            groups = sums(1, bench.seed)
            if model == "mid":
                groups = texts([1], bench.seed, vocabulary=VOCABULARY, prompt_tokens=8)
            with bench.engine(backend, model, "f32") as process:
                process.open(width=GROUP_SIZE)
                figures = process.swap(bench.adapters(model), times=SWAPS[model], groups=groups)
            bench.progress.done(name, figures)
            rows.append({"part": "swap", "model": model, "backend": backend, **figures})
    return rows


def prefix_sharing(bench: Bench) -> Rows:
    """Compare one group of 16 rollouts on a long prompt with 16 single rollouts on 16 prompts of that length."""
    if not bench.progress.wants(SHARED):
        return []
    tokens, seed = SHARED_TOKENS, bench.seed
    prompts = {"vocabulary": VOCABULARY, "prompt_tokens": SHARED_PROMPT_TOKENS}
    together = texts([tokens], seed, group_size=SHARED_GROUP, **prompts)
    apart = texts([tokens] * SHARED_GROUP, seed + 1, group_size=1, **prompts)
    with bench.engine("llama_cpp", "mid", "auto") as process:
        process.open(width=SHARED_GROUP)
        process.sample(texts([tokens], seed + 2, vocabulary=VOCABULARY, group_size=SHARED_GROUP))
        shared, single = process.sample(together), process.sample(apart)
    row = {"shared_s": shared.seconds, "single_s": single.seconds, "speedup": single.seconds / shared.seconds}
    bench.progress.done(SHARED, row)
    return [{"part": SHARED, "model": "mid", "backend": "llama_cpp", **row}]


def split(bench: Bench) -> Rows:
    """Compare one model split over two processes with the same model in one process. Each process of the pair has half
    of the layers and one thread; the single process has one thread.
    """
    if not bench.progress.wants(SPLIT):
        return []
    groups = texts([SPLIT_TOKENS], bench.seed + 3, vocabulary=VOCABULARY)
    engines = [bench.engine("llama_cpp", "mid", "f32") for _ in range(2)]
    with _lending(bench.scratch / "helper") as address, engines[0] as whole, engines[1] as halves:
        whole.open(width=GROUP_SIZE, threads=1)
        halves.open(width=GROUP_SIZE, threads=1, helpers=(address,))
        repetitions = bench.progress.repetitions(SPLIT_REPETITIONS, within_s=SPLIT_S, least=2)
        runs = [(whole.sample(groups), halves.sample(groups)) for _ in repetitions][1:]
    row = {
        "tokens_per_s": statistics.median(halved.tokens_per_s for _, halved in runs),
        "whole_tokens_per_s": statistics.median(one.tokens_per_s for one, _ in runs),
        "same_tokens": all(_drawn(one) == _drawn(other) for one, other in runs),
    }
    bench.progress.done(SPLIT, row)
    return [{"part": SPLIT, "model": "mid", "backend": "llama_cpp", **row}]


def busy(bench: Bench) -> Rows:
    """Sample while a busy program runs on each core. Alternate between the number of threads that the engine chooses
    and one thread.
    """
    rows: Rows = []
    for name, backend in BUSY.items():
        if bench.progress.wants(name):
            groups = sums(BUSY_GROUPS, bench.seed + 4)
            engines = [bench.engine(backend, "tiny", "f32") for _ in range(2)]
            with engines[0] as free, engines[1] as single, _busy_cores():
                free.open(width=AGREEMENT_WIDTH)
                single.open(width=AGREEMENT_WIDTH, threads=1)
                repetitions = bench.progress.repetitions(BUSY_REPETITIONS, within_s=BUSY_S, least=3)
                runs = [(free.sample(groups), single.sample(groups)) for _ in repetitions][1:]
            chosen, one = (statistics.median(run.tokens_per_s for run in side) for side in zip(*runs, strict=True))
            row = {"tokens_per_s": chosen, "one_thread_tokens_per_s": one, "over_one_thread": chosen / one}
            bench.progress.done(name, row)
            rows.append({"part": "busy", "model": "tiny", "backend": backend, **row})
    return rows


def headline(rows: Rows) -> dict[str, Any]:
    return {
        "identical_rollouts_f32": least((row for row in rows if row.get("precision") == "f32"), "identical"),
        "swap_growth": most((row for row in rows if row["model"] == "tiny"), "growth"),
        "prefix_sharing_speedup": least(rows, "speedup"),
        "rpc_same_tokens": least(rows, "same_tokens"),
        "busy_over_one_thread": least(rows, "over_one_thread"),
    }


def _drawn(run: Run) -> dict[tuple[int, int], list[int]]:
    return {(rollout.lease_id, rollout.index): rollout.completion_ids.tolist() for rollout in run.rollouts}


@contextmanager
def _lending(directory: Path) -> Iterator[str]:
    options = ["--host", "127.0.0.1", "--port", "0", "--threads", "1", "--data-dir", str(directory)]
    command = [sys.executable, "-u", "-m", "echo_node.main", "lend", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if found := re.search(r"--with (\S+)", line):
                    yield found[1]
                    return
            raise RuntimeError(f"echo-node lend gave no address: {''.join(said)}")
        finally:
            process.terminate()


@contextmanager
def _busy_cores() -> Iterator[None]:
    """Keep every core busy during the block: one program on each core computes without pause."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


ALL: Final = (agreement, swaps, prefix_sharing, split, busy)
