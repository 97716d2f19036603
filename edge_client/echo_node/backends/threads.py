"""The number of CPU threads that an engine uses, adjusted while it samples.

The threads of one operation wait for each other. If other programs use the cores, one thread that gets no core delays
all others: two threads of llama.cpp or PyTorch then drew a tenth to a hundredth of what one thread drew (SmolLM2-135M,
two busy cores). So the number follows the cores that the engine gets. A trial of another number lasts some steps; only
a faster number is kept.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import psutil

WINDOW_S: Final = 0.5
"""Seconds of sampling for one measurement of speed with one number of threads: dozens of an operating system's
scheduling periods.
"""
HOLD_S: Final = 4.0
"""After a trial with more threads was slower, wait this many seconds before the next such trial. Each further failure
doubles this wait, up to `LONGEST_HOLD_S`.
"""
LONGEST_HOLD_S: Final = 60.0
_GAIN: Final = 1.1
"""Minimum ratio of the trial's speed to the previous speed; below this ratio, the trial's number of threads is dropped.
The speed of a steady engine varies less between two windows.
"""
_SLACK: Final = 0.25
"""If the process uses only this many cores fewer than it has threads, no lack of cores is assumed: an engine's calls
are not parallel throughout.
"""


@dataclass(frozen=True, slots=True)
class _Window:
    threads: int
    steps_per_s: float
    cores: float
    """Average number of cores that the process used."""


class Threads:
    """Chooses the number of threads, `count`, from 1 to `most`, by the measured time of steps. If `fixed`, `count`
    stays `most`.
    """

    def __init__(self, most: int, *, fixed: bool) -> None:
        self._most, self._fixed = most, fixed
        self.count = most
        self._steps, self._seconds, self._cpu_s = 0, 0.0, 0.0
        self._before: _Window | None = None
        """Measurement with the previous number of threads, while another number is tried; None: no trial runs."""
        self._hold_s, self._wait_s = HOLD_S, 0.0
        self._rejected_at = 0.0
        """Number of cores that the process used when fewer threads were last tried and turned out slower. Fewer threads
        are tried again only when the process uses still fewer cores. 0 = no such trial yet.
        """

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Measure during this `with` block, in which a model is loaded, how many cores other programs leave free. Then
        set `count` to that number.
        """
        wall, idle, own = time.perf_counter(), psutil.cpu_times().idle, time.process_time()
        yield
        seconds = time.perf_counter() - wall
        free = (psutil.cpu_times().idle - idle + time.process_time() - own) / seconds
        if not self._fixed:
            self.count = min(self._most, max(1, round(free)))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measure this `with` block as one step of the engine: one token for every unfinished rollout."""
        wall, own = time.perf_counter(), time.process_time()
        yield
        self.add(time.perf_counter() - wall, time.process_time() - own)

    def add(self, seconds: float, cpu_s: float) -> None:
        """Count a step of `seconds` seconds, in which the process used `cpu_s` seconds of processor time."""
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
        """Start a trial of fewer threads if some threads wait for a core, else of more threads."""
        lacks = now.cores < now.threads - _SLACK
        # An earlier trial of fewer threads was slower although some cores were unused, because this model's computation
        # is only partly parallel. So try fewer threads again only if they use even fewer cores than before that trial.
        if lacks and self._rejected_at:
            lacks = now.cores < self._rejected_at - _SLACK
        if lacks and now.threads > 1:
            self._before, self.count = now, max(1, int(now.cores + _SLACK))
        elif not lacks and now.threads < self._most and not self._wait_s:
            self._before, self.count = now, min(self._most, 2 * now.threads)
