"""The number of threads that an engine on a CPU uses, chosen while it samples.

The threads of one operation wait for each other. Where other programs use the cores, one thread that gets no core holds
up all others: two threads of llama.cpp or PyTorch drew a tenth to a fortieth of what one thread drew (SmolLM2-135M, two
busy cores). So the number follows the cores that the engine gets, and of two numbers the faster one stays.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import psutil

WINDOW_S: Final = 0.5
"""Seconds of steps before numbers are compared: dozens of scheduling periods of an operating system."""
HOLD_S: Final = 4.0
"""Seconds until more threads, once slower, are tried again. Each failure doubles them, up to `LONGEST_HOLD_S`."""
LONGEST_HOLD_S: Final = 60.0
_GAIN: Final = 1.1
"""Least ratio of speeds for a change: windows of a steady engine differ by less."""
_SLACK: Final = 0.25
"""Part of a core that may be missing: the engine's calls are not parallel throughout."""


@dataclass(frozen=True, slots=True)
class _Window:
    threads: int
    steps_per_s: float
    cores: float
    """Cores that the process got."""


class Threads:
    """Chooses `count`, from 1 to `most`, by the duration of steps. If `fixed`, it stays `most`."""

    def __init__(self, most: int, *, fixed: bool) -> None:
        self._most, self._fixed = most, fixed
        self.count = most
        self._steps, self._seconds, self._cpu_s = 0, 0.0, 0.0
        self._before: _Window | None = None
        """The window before the present trial."""
        self._hold_s, self._wait_s = HOLD_S, 0.0
        self._rejected_at = 0.0
        """Cores that the process got when fewer threads were slower; 0 = they were not."""

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Set `count` to the cores that other programs leave free during this block, which loads a model."""
        wall, idle, own = time.perf_counter(), psutil.cpu_times().idle, time.process_time()
        yield
        seconds = time.perf_counter() - wall
        free = (psutil.cpu_times().idle - idle + time.process_time() - own) / seconds
        if not self._fixed:
            self.count = min(self._most, max(1, round(free)))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Count this block as one step: the same work for all rollouts in progress."""
        wall, own = time.perf_counter(), time.process_time()
        yield
        self.add(time.perf_counter() - wall, time.process_time() - own)

    def add(self, seconds: float, cpu_s: float) -> None:
        """Count a step of so many seconds, in which the process used `cpu_s` seconds of processor time."""
        self._steps, self._seconds, self._cpu_s = self._steps + 1, self._seconds + seconds, self._cpu_s + cpu_s
        if self._seconds >= WINDOW_S and not self._fixed:
            window = _Window(self.count, self._steps / self._seconds, self._cpu_s / self._seconds)
            self._wait_s = max(0.0, self._wait_s - self._seconds)
            self._steps, self._seconds, self._cpu_s = 0, 0.0, 0.0
            self._judge(window)

    def _judge(self, now: _Window) -> None:
        before, self._before = self._before, None
        if before is None:
            self._try_another(now)
        elif now.steps_per_s > _GAIN * before.steps_per_s:
            self._hold_s, self._wait_s, self._rejected_at = HOLD_S, 0.0, 0.0
        else:
            self.count = before.threads
            if now.threads < before.threads:
                self._rejected_at = before.cores
            else:
                self._wait_s, self._hold_s = self._hold_s, min(2 * self._hold_s, LONGEST_HOLD_S)

    def _try_another(self, now: _Window) -> None:
        """Begin a trial of fewer threads if some got no core, else of more."""
        lacks = now.cores < now.threads - _SLACK
        if lacks and self._rejected_at:  # Fewer were slower: the cores are free, and the model is parallel in part.
            lacks = now.cores < self._rejected_at - _SLACK
        if lacks and now.threads > 1:
            self._before, self.count = now, max(1, int(now.cores + _SLACK))
        elif not lacks and now.threads < self._most and not self._wait_s:
            self._before, self.count = now, min(self._most, 2 * now.threads)
