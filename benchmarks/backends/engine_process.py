"""One engine in a process of its own, as a node runs it, so that no engine's idle threads slow another one down."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.backends.replay import Recording
from echo_node.backends.base import Engine, EngineSettings, PreparedPolicy
from echo_node.backends.registry import make_engine
from echo_shared.sampling import FinishedRollout, GroupRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One timed pass over some groups."""

    seconds: float
    rollouts: list[FinishedRollout]

    @property
    def tokens(self) -> int:
        return sum(len(rollout.completion_ids) for rollout in self.rollouts)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Swaps:
    """What replacing the adapter costs."""

    prepare_ms: float
    """Median; done while the version before is sampled."""
    swap_ms: float
    """Median; between the last rollout of one version and the first of the next."""
    resident_before: int
    resident_after: int
    """Bytes, after the first swaps and after all."""


class EngineProcess:
    """Calls run one at a time in the child; errors come back as they are."""

    def __init__(self, backend: str, base: Path, derived: Path, precision: str) -> None:
        self.backend = backend
        self.precision = precision
        self._model = (base, derived)
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown()

    def open(self, *, width: int, threads: int, helpers: tuple[str, ...] = ()) -> None:
        """Opens the engine, anew if it is open."""
        settings = EngineSettings(width=width, threads=threads, precision=self.precision, helpers=helpers)
        self._call(_open, self.backend, *self._model, settings)

    def sample(self, groups: list[GroupRequest]) -> Run:
        """All rollouts of `groups`, as fast as they come."""
        run: Run = self._call(_sample, groups)
        return run

    def record(self, groups: list[GroupRequest]) -> None:
        """Notes the calls into llama.cpp that sampling `groups` makes, for `replay`."""
        self._call(_record, groups)

    def replay(self) -> float:
        """Makes the noted calls again, with nothing between them; returns the seconds."""
        seconds: float = self._call(_replay)
        return seconds

    def swap(self, adapters: tuple[Path, Path], *, times: int, groups: list[GroupRequest]) -> Swaps:
        """Samples `groups` by one adapter and the other in turns."""
        swaps: Swaps = self._call(_swap, adapters, times, groups)
        return swaps

    def set_policy(self, adapter: Path | None) -> None:
        self._call(_set_policy, adapter)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._pool.submit(function, *arguments).result()


# The rest runs in the child.

_engine: Engine | None = None
_recording: Recording
_policy: PreparedPolicy | None = None


def _open(backend: str, base: Path, derived: Path, settings: EngineSettings) -> None:
    global _engine
    if _engine is not None:
        _engine.close()
    _engine = make_engine(backend)
    _engine.open(base, derived, settings)
    _engine.set_policy(None)


def _opened() -> Engine:
    if _engine is None:
        raise RuntimeError("the engine is not open")
    return _engine


def _sample(groups: list[GroupRequest]) -> Run:
    gc.collect()
    began = time.perf_counter()
    events = list(itertools.chain.from_iterable(_opened().sample(iter(groups))))
    seconds = time.perf_counter() - began
    rollouts = [event for event in events if isinstance(event, FinishedRollout)]
    if len(rollouts) != sum(len(group.indices) for group in groups):
        raise RuntimeError(f"some groups could not be sampled: {events}")
    return Run(seconds=seconds, rollouts=rollouts)


def _record(groups: list[GroupRequest]) -> None:
    global _recording
    _recording = Recording.of(lambda: _sample(groups))


def _replay() -> float:
    return _recording.replay()


def _set_policy(adapter: Path | None) -> None:
    global _policy
    before, _policy = _policy, None if adapter is None else _opened().prepare(adapter)
    _opened().set_policy(_policy)
    if before is not None:
        before.free()


def _swap(adapters: tuple[Path, Path], times: int, groups: list[GroupRequest]) -> Swaps:
    engine = _opened()
    prepare_ms, swap_ms, resident = [], [], []
    current: PreparedPolicy | None = None
    for number in range(times):
        began = time.perf_counter()
        following = engine.prepare(adapters[number % 2])
        prepared = time.perf_counter()
        engine.set_policy(following)
        swapped = time.perf_counter()
        if current is not None:
            current.free()
        current = following
        _sample(groups)
        prepare_ms.append(1e3 * (prepared - began))
        swap_ms.append(1e3 * (swapped - prepared))
        resident.append(psutil.Process().memory_info().rss)
    settled = min(len(resident) - 1, 10)
    engine.set_policy(None)
    if current is not None:
        current.free()
    return Swaps(
        prepare_ms=statistics.median(prepare_ms),
        swap_ms=statistics.median(swap_ms),
        resident_before=resident[settled],
        resident_after=resident[-1],
    )
