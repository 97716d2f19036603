"""Rests between an engine's steps, so that the engine uses at most a given share of its device's time.

    share 0.25 of a GPU: a step of 20 ms, then a rest of 60 ms
    share 0.25 of four cores: a step of 20 ms with four threads, then a rest of 60 ms; with one thread, no rest

On a GPU, the duration of the steps counts. On a processor, the computing time of all threads of this process counts,
relative to the process's cores. So an engine rests less while other programs occupy cores that it could use.
"""

from __future__ import annotations

import time
from typing import Final

CREDIT_S: Final = 0.1
"""Maximum seconds by which rests that were too long shorten later rests. Systems end a rest late by up to
milliseconds.
"""
LONGEST_STEP_S: Final = 10.0
"""Maximum seconds of a step that count on a GPU: in a longer one, this process was most likely suspended."""


class DutyCycle:
    """Measures steps and computes rests. Call `begin` before a step and `end` after it, then rest for `rest_s`
    seconds.
    """

    def __init__(self, cores: int) -> None:
        """`cores`: number of processor cores that count as the whole device; 0 = the device is a GPU."""
        self._share = 1.0
        self._cores = cores
        self._begun_at = self._free_at = time.perf_counter()
        self._cpu_s = time.process_time()

    def limit(self, share: float) -> None:
        """Use at most this share of the device's time, above 0, from now on. A running rest gets the length that the
        new share gives it.
        """
        now = time.perf_counter()
        self._free_at = now + (self._free_at - now) * (self._share / share if self._free_at > now else 1.0)
        self._share = share

    def forgive(self) -> None:
        """Forget the processor time that the process used since the last step, for a measurement: no rest follows from
        it.
        """
        self._cpu_s = time.process_time()

    def begin(self) -> None:
        self._begun_at = time.perf_counter()

    def end(self) -> None:
        """End a step: count the time since `begin`; on a processor, also the process's work between steps."""
        now, cpu_s = time.perf_counter(), time.process_time()
        step_s = min(now - self._begun_at, LONGEST_STEP_S)
        cost_s = (cpu_s - self._cpu_s) / self._cores if self._cores else step_s
        self._cpu_s = cpu_s
        self._free_at = max(self._free_at, self._begun_at - CREDIT_S) + cost_s / self._share
        if self._share >= 1:
            # At share 1, no rest is due, even if threads used more time than the device's cores have.
            self._free_at = min(self._free_at, now)

    @property
    def rest_s(self) -> float:
        """Seconds until the next step may begin; 0 = it may begin now."""
        return 0.0 if self._share >= 1 else max(0.0, self._free_at - time.perf_counter())
