"""The parts besides speed: agreement, swaps, shared prompts, one model over two processes."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.backends import cases, throughput
from benchmarks.backends.agreement import Reference
from benchmarks.backends.engine_process import EngineProcess, Run
from benchmarks.backends.models import GROUP_SIZE, Models, sums, texts
from benchmarks.backends.throughput import Figures
from benchmarks.harness.progress import Planned, Progress

AGREEMENT_ENGINES: Final = (
    ("llama_cpp", ("f32", "f16", "q8_0", "q4_k_m")),
    ("torch", ("f32", "bf16")),
    ("mlx", ("f32", "f16", "q8_0", "q4_0")),
)
AGREEMENT_GROUPS: Final = 128
AGREEMENT_WIDTH: Final = 64
SWAPS: Final = 200
MID_SWAPS: Final = 12
SHARED_PROMPT_TOKENS: Final = 512
SHARED_GROUP: Final = 16
SHARED_MAX_TOKENS: Final = 2
SPLIT_TOKENS: Final = 8
SPLIT_REPETITIONS: Final = 3
SPLIT_S: Final = 120.0
"""Time after which a third or fourth repetition is left out."""

SWAP_ENGINES: Final = (
    ("tiny", "llama_cpp"),
    ("tiny", "torch"),
    ("tiny", "mlx"),
    ("mid", "llama_cpp"),
    ("mid", "torch"),
)


def plan() -> list[Planned]:
    return [
        *(
            Planned(name=cases.agreement(backend, precision), seconds=10, lacks=cases.lacks(backend, precision))
            for backend, precisions in AGREEMENT_ENGINES
            for precision in precisions
        ),
        *(
            Planned(name=cases.swap(model, backend), seconds=20, lacks=cases.lacks(backend, "f32"))
            for model, backend in SWAP_ENGINES
        ),
        Planned(name=cases.PREFIX_SHARING, seconds=40, lacks=cases.lacks("llama_cpp", "auto")),
        Planned(name=cases.SPLIT, seconds=40, lacks=cases.lacks("llama_cpp", "f32")),
    ]


def agreement(models: Models, scratch: Path, progress: Progress, *, seed: int, threads: int) -> Figures:
    """Compare engines on the trained model, with and without an adapter."""
    wanted = [
        (backend, precision)
        for backend, precisions in AGREEMENT_ENGINES
        for precision in precisions
        if progress.wants(cases.agreement(backend, precision))
    ]
    if not wanted:
        return {"identical_rollouts_f32": None}, []
    groups = sums(AGREEMENT_GROUPS, seed + 1)
    rows = []
    references = {adapter: Reference(models.tiny, adapter) for adapter in (None, models.tiny_adapters[0])}
    for backend, precision in wanted:
        of_engine = []
        with EngineProcess(backend, models.tiny, scratch / "tiny", precision) as process:
            process.open(width=AGREEMENT_WIDTH, threads=threads)
            for adapter, reference in references.items():
                process.set_policy(adapter)
                found = reference.compare(groups, process.sample(groups).rollouts)
                of_engine.append(
                    {
                        "part": "agreement",
                        "model": "tiny" if adapter is None else "tiny + adapter",
                        "backend": backend,
                        "precision": precision,
                        "rollouts": AGREEMENT_GROUPS * GROUP_SIZE,
                        "identical": found.identical,
                        "mean_logprob_difference": found.mean_difference,
                        "max_logprob_difference": found.max_difference,
                    }
                )
        identical = {f"identical, {row['model']}": row["identical"] for row in of_engine}
        progress.done(cases.agreement(backend, precision), identical)
        rows += of_engine
    exact = [row["identical"] for row in rows if row["precision"] == "f32"]
    return {"identical_rollouts_f32": min(exact, default=None)}, rows


def swaps(models: Models, scratch: Path, progress: Progress, *, seed: int, threads: int) -> Figures:
    """Swap two adapters in turns, and sample a group with each."""
    rows = []
    for model, backend in SWAP_ENGINES:
        if progress.wants(cases.swap(model, backend)):
            row = _swap(backend, model, models, scratch, seed=seed, threads=threads)
            progress.done(cases.swap(model, backend), {name: row[name] for name in ("swap_ms", "prepare_ms", "growth")})
            rows.append(row)
    growth = [row["growth"] for row in rows if row["swaps"] == SWAPS]
    return {"swap_growth": max(growth, default=None)}, rows


def _swap(backend: str, model: str, models: Models, scratch: Path, *, seed: int, threads: int) -> dict[str, Any]:
    is_tiny = model == "tiny"
    base, adapters = (models.tiny, models.tiny_adapters) if is_tiny else (models.mid, models.mid_adapters)
    groups = sums(1, seed) if is_tiny else texts([1], seed, prompt_tokens=8)
    times = SWAPS if is_tiny else MID_SWAPS
    with EngineProcess(backend, base, scratch / ("tiny" if is_tiny else "mid-gguf"), "f32") as process:
        process.open(width=GROUP_SIZE, threads=threads)
        found = process.swap(adapters, times=times, groups=groups)
    return {
        "part": "swap",
        "model": model,
        "backend": backend,
        "precision": "f32",
        "swaps": times,
        "swap_ms": found.swap_ms,
        "prepare_ms": found.prepare_ms,
        "resident_mib": found.resident_after / 2**20,
        "growth": found.resident_after / found.resident_before - 1,
    }


def prefix_sharing(models: Models, scratch: Path, progress: Progress, *, seed: int, threads: int) -> Figures:
    """Compare one group of 16 on a long prompt with 16 single rollouts on 16 prompts of that length."""
    if not progress.wants(cases.PREFIX_SHARING):
        return {"prefix_sharing_speedup": None}, []
    lengths = {"prompt_tokens": SHARED_PROMPT_TOKENS}
    together = texts([SHARED_MAX_TOKENS], seed, group_size=SHARED_GROUP, **lengths)
    apart = texts([SHARED_MAX_TOKENS] * SHARED_GROUP, seed + 1, group_size=1, **lengths)
    with EngineProcess("llama_cpp", models.mid, scratch / "mid-gguf", "auto") as process:
        process.open(width=SHARED_GROUP, threads=threads)
        process.sample(texts([SHARED_MAX_TOKENS], seed + 2, group_size=SHARED_GROUP))
        shared, single = process.sample(together), process.sample(apart)
    row = {
        "part": "prefix sharing",
        "model": "mid",
        "backend": "llama_cpp",
        "precision": "auto",
        "width": SHARED_GROUP,
        "shared_s": shared.seconds,
        "single_s": single.seconds,
        "speedup": single.seconds / shared.seconds,
    }
    progress.done(cases.PREFIX_SHARING, {name: row[name] for name in ("shared_s", "single_s", "speedup")})
    return {"prefix_sharing_speedup": row["speedup"]}, [row]


def split(models: Models, scratch: Path, progress: Progress, *, seed: int, threads: int) -> Figures:
    """Compare one model in two processes, with half of the layers each, with one process; one thread in each."""
    if not progress.wants(cases.SPLIT):
        return {"rpc_same_tokens": None}, []
    groups = texts([SPLIT_TOKENS], seed + 3)
    engines = [EngineProcess("llama_cpp", models.mid, scratch / "mid-gguf", "f32") for _ in range(2)]
    with _lending(scratch / "helper") as address, engines[0] as whole, engines[1] as halves:
        whole.open(width=GROUP_SIZE, threads=1)
        halves.open(width=GROUP_SIZE, threads=1, helpers=(address,))
        repetitions = progress.repetitions(SPLIT_REPETITIONS + 1, within_s=SPLIT_S, least=2)
        runs = [(whole.sample(groups), halves.sample(groups)) for _ in repetitions][1:]
    same = all(_drawn(one) == _drawn(other) for one, other in runs)
    row = {
        "part": "split",
        "model": "mid",
        "backend": "llama_cpp",
        "precision": "f32",
        "width": GROUP_SIZE,
        "tokens_per_s": statistics.median(halved.tokens_per_s for _, halved in runs),
        "whole_tokens_per_s": statistics.median(one.tokens_per_s for one, _ in runs),
        "same_tokens": same,
    }
    progress.done(cases.SPLIT, {name: row[name] for name in ("tokens_per_s", "whole_tokens_per_s", "same_tokens")})
    return {"rpc_same_tokens": same}, [row]


def _drawn(run: Run) -> dict[tuple[int, int], list[int]]:
    return {(rollout.lease_id, rollout.index): rollout.completion_ids.tolist() for rollout in run.rollouts}


@contextmanager
def _lending(directory: Path) -> Iterator[str]:
    """Run `echo-node lend` in a process of its own; yield the argument of `--with`."""
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


ALL: Final = (throughput.on_tiny, throughput.on_mid, agreement, swaps, prefix_sharing, split)
