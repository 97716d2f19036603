"""A sampling engine in a separate process, as in a node, so that idle threads of one engine slow down no other
engine."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.backends.replay import Recording
from benchmarks.harness.pool import Remote
from echo_node.backends.base import Engine, EngineSettings, PreparedPolicy
from echo_node.backends.registry import make_engine
from echo_node.host import hardware
from echo_shared.sampling.interface import FinishedRollout, GroupRequest


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
    """Cost of replacing the adapter. Times are medians."""

    prepare_ms: float
    """Milliseconds of `prepare`, which reads and converts an adapter."""
    swap_ms: float
    """Milliseconds of `set_policy`, which puts the prepared adapter in place of the previous one."""
    resident_before: int
    resident_after: int
    """Resident bytes of the engine's process after the first eleven swaps at most, and after all swaps."""


class EngineProcess(Remote):
    """An engine in a child process. Calls run there one at a time."""

    def __init__(self, backend: str, base: Path, derived: Path, precision: str) -> None:
        super().__init__(_SamplingEngine, backend, base, derived)
        self.backend = backend
        self.precision = precision

    def open(self, *, width: int, threads: int | None = None, helpers: tuple[str, ...] = ()) -> None:
        """Open the engine, or close it and open it again. By default it gets as many threads as in a node."""
        threads = threads or hardware.sensible_threads()
        self.call("open", EngineSettings(width=width, threads=threads, precision=self.precision, helpers=helpers))

    def sample(self, groups: list[GroupRequest]) -> Run:
        """Sample all rollouts of the groups."""
        run: Run = self.call("sample", groups)
        return run

    def record(self, groups: list[GroupRequest]) -> None:
        """Record the calls into llama.cpp that sampling these groups makes, for `replay`."""
        self.call("record", groups)

    def replay(self) -> float:
        """Repeat the recorded calls without sampling and other work between them; return the seconds."""
        seconds: float = self.call("replay")
        return seconds

    def swap(self, adapters: tuple[Path, Path], *, times: int, groups: list[GroupRequest]) -> Swaps:
        """Sample the groups with both adapters in turns."""
        swaps: Swaps = self.call("swap", adapters, times, groups)
        return swaps

    def set_policy(self, adapter: Path | None) -> None:
        """Sample with this adapter from now on; None for the base model."""
        self.call("set_policy", adapter)


class _SamplingEngine:
    """The engine in the child process."""

    def __init__(self, backend: str, base: Path, derived: Path) -> None:
        self._backend = backend
        self._model = base, derived
        self._engine: Engine | None = None
        self._policy: PreparedPolicy | None = None
        self._recording = Recording()

    def open(self, settings: EngineSettings) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = make_engine(self._backend)
        self._engine.open(*self._model, settings)
        self._engine.set_policy(None)

    @property
    def _opened(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the engine is not open")
        return self._engine

    def sample(self, groups: list[GroupRequest]) -> Run:
        gc.collect()
        began = time.perf_counter()
        events = list(itertools.chain.from_iterable(self._opened.sample(iter(groups))))
        seconds = time.perf_counter() - began
        rollouts = [event for event in events if isinstance(event, FinishedRollout)]
        if len(rollouts) != sum(len(group.indices) for group in groups):
            raise RuntimeError(f"some groups could not be sampled: {events}")
        return Run(seconds=seconds, rollouts=rollouts)

    def record(self, groups: list[GroupRequest]) -> None:
        self._recording = Recording.of(lambda: self.sample(groups))

    def replay(self) -> float:
        return self._recording.replay()

    def set_policy(self, adapter: Path | None) -> None:
        before, self._policy = self._policy, None if adapter is None else self._opened.prepare(adapter)
        self._opened.set_policy(self._policy)
        if before is not None:
            before.free()

    def swap(self, adapters: tuple[Path, Path], times: int, groups: list[GroupRequest]) -> Swaps:
        engine = self._opened
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
            self.sample(groups)
            prepare_ms.append(1e3 * (prepared - began))
            swap_ms.append(1e3 * (swapped - prepared))
            resident.append(psutil.Process().memory_info().rss)
        engine.set_policy(None)
        if current is not None:
            current.free()
        return Swaps(
            prepare_ms=statistics.median(prepare_ms),
            swap_ms=statistics.median(swap_ms),
            resident_before=resident[min(len(resident) - 1, 10)],
            resident_after=resident[-1],
        )
