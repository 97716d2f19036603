"""Runs sampling engines of nodes without a node: `lacks` tells which of them this machine can run, `SamplingEngine`
samples groups of requests.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from echo_hub.run.base_files import resolve_base
from echo_hub.tasks.arithmetic import ArithmeticOptions, ArithmeticTask
from echo_node.backends.base import Engine, EngineSettings, PreparedPolicy
from echo_node.backends.registry import make_engine, survey
from echo_node.host import hardware
from echo_shared.sampling import draws
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.torch_precision import multiplies

if TYPE_CHECKING:
    from benchmarks.backends.replay import Recording


@cache
def lacks(backend: str, precision: str) -> str:
    """Return why this machine cannot run the engine on its CPU in this precision; "" if it can."""
    for possible in survey(hardware.detect()):
        if (possible.choice.name, possible.choice.device) == (backend, "cpu") and possible.missing is not None:
            return possible.missing.got or possible.missing.what
    if (backend, precision) == ("torch", "bf16") and not multiplies(torch.device("cpu"), torch.bfloat16):
        return "hardware that multiplies bfloat16"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    seconds: float
    rollouts: list[FinishedRollout]

    @property
    def tokens_per_s(self) -> float:
        return sum(len(rollout.completion_ids) for rollout in self.rollouts) / self.seconds


class SamplingEngine:
    """A sampling engine under measurement. It should run in its own process (`pool.apart`), so that its idle threads
    slow down no other engine.
    """

    def __init__(self, backend: str, base: Path, derived: Path, precision: str) -> None:
        self._engine: Engine | None = None
        self._backend = backend
        self._model = base, derived
        self._precision = precision
        self._policy: PreparedPolicy | None = None
        self._recording: Recording | None = None

    def open(self, *, width: int, threads: int | None = None, helpers: tuple[str, ...] = ()) -> None:
        """Open the engine, or reopen it. The default number of threads is that of a node."""
        self.close()
        self._engine, self._policy = make_engine(self._backend), None
        threads = threads or hardware.sensible_threads()
        settings = EngineSettings(width=width, threads=threads, precision=self._precision, helpers=helpers)
        self._engine.open(*self._model, settings)
        self._engine.set_policy(None)

    def sample(self, groups: list[GroupRequest]) -> Run:
        """Sample all rollouts of the groups. Raises RuntimeError if a group fails."""
        gc.collect()
        began = time.perf_counter()
        events = list(itertools.chain.from_iterable(self._opened.sample(iter(groups))))
        seconds = time.perf_counter() - began
        rollouts = [event for event in events if isinstance(event, FinishedRollout)]
        if len(rollouts) != sum(len(group.indices) for group in groups):
            raise RuntimeError(f"some groups could not be sampled: {events}")
        return Run(seconds=seconds, rollouts=rollouts)

    def record(self, groups: list[GroupRequest]) -> None:
        """Record the calls into llama.cpp while sampling these groups."""
        from benchmarks.backends.replay import Recording  # The import requires llama.cpp, which not every machine has.

        self._recording = Recording.of(lambda: self.sample(groups))

    def replay(self) -> float:
        """Repeat the recorded calls into llama.cpp; return the seconds that they took."""
        assert self._recording is not None, "record calls first"
        return self._recording.replay()

    def set_policy(self, adapter: Path | None) -> None:
        """Sample with this adapter from now on; None for the base model."""
        before, self._policy = self._policy, None if adapter is None else self._opened.prepare(adapter)
        self._opened.set_policy(self._policy)
        if before is not None:
            before.free()

    def swap(self, adapters: tuple[Path, Path], *, times: int, groups: list[GroupRequest]) -> dict[str, float]:
        """Sample the groups `times` times, each time with the other adapter. Return the median milliseconds for
        preparing and for activating an adapter, and by what share the resident memory has grown since the eleventh
        swap.
        """
        prepare_ms, swap_ms, resident = [], [], []
        for number in range(times):
            began = time.perf_counter()
            following = self._opened.prepare(adapters[number % 2])
            prepared = time.perf_counter()
            self._opened.set_policy(following)
            swap_ms.append(1e3 * (time.perf_counter() - prepared))
            prepare_ms.append(1e3 * (prepared - began))
            if self._policy is not None:
                self._policy.free()
            self._policy = following
            self.sample(groups)
            resident.append(psutil.Process().memory_info().rss)
        self.set_policy(None)
        return {
            "swap_ms": statistics.median(swap_ms),
            "prepare_ms": statistics.median(prepare_ms),
            "growth": resident[-1] / resident[min(times - 1, 10)] - 1,
        }

    def resident_bytes(self) -> int:
        """Return the resident memory of this process."""
        return int(psutil.Process().memory_info().rss)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    @property
    def _opened(self) -> Engine:
        assert self._engine is not None, "open it first"
        return self._engine


GROUP_SIZE: Final = 8
PROMPT_TOKENS: Final = 32
SUM_TOKENS: Final = 8


def group_request(
    number: int,
    prompt_ids: NDArray[np.int32],
    *,
    seed: int,
    indices: Sequence[int],
    max_tokens: int,
    stop_ids: Sequence[int] = (),
    temperature: float = 1.0,
) -> GroupRequest:
    """Make a request for version 0. `number` is both its lease id and its group id."""
    return GroupRequest(
        lease_id=number,
        group_id=number,
        indices=tuple(indices),
        prompt_ids=prompt_ids,
        seed=seed,
        policy_version=0,
        temperature=temperature,
        max_tokens=max_tokens,
        stop_ids=tuple(stop_ids),
    )


def sums(count: int, seed: int, *, group_size: int = GROUP_SIZE) -> list[GroupRequest]:
    """Make groups of additions, the built-in model's own task. The completions are short, and end with a stop token."""
    task = ArithmeticTask(ArithmeticOptions())
    base = resolve_base("builtin:tiny")
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    stop_id = json.loads((base / "config.json").read_text())["eos_token_id"]
    return [
        group_request(
            number,
            np.array(tokenizer.encode(task.sample(draws.derive_seed(seed, number)).prompt).ids, np.int32),
            seed=draws.derive_seed("sums", seed, number),
            indices=range(group_size),
            max_tokens=SUM_TOKENS,
            stop_ids=(stop_id,),
        )
        for number in range(count)
    ]


def texts(
    max_tokens: Sequence[int],
    seed: int,
    *,
    vocabulary: int,
    prompt_tokens: int = PROMPT_TOKENS,
    group_size: int = GROUP_SIZE,
) -> list[GroupRequest]:
    """Make groups of random tokens. Each number in `max_tokens` gives one group, whose completions have exactly this
    length.
    """
    rng = np.random.default_rng(seed)
    return [
        group_request(
            number,
            rng.integers(0, vocabulary, prompt_tokens).astype(np.int32),
            seed=draws.derive_seed("texts", seed, number),
            indices=range(group_size),
            max_tokens=limit,
        )
        for number, limit in enumerate(max_tokens)
    ]
