"""Cache slow readings, and refresh them on a background thread while callers get the last result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, ParamSpec, TypeVar

QUICK_S: Final = 0.02
"""Processor seconds. Callers do quick readings themselves and get a current result."""
REST: Final = 200.0
"""Least time between readings, as a multiple of the last one's processor time."""

P = ParamSpec("P")
T = TypeVar("T")


class ReadBeside(Generic[P, T]):
    """Caches the result of `read`. Thread-safe; only one reading runs at a time.

    Callers wait for the first reading that returns anything but None. The next reading starts at the earliest `every_s`
    later, and `REST` times the last one's processor time later. If the last one was quick, the next caller does it;
    else a background thread does it, and callers get the last result meanwhile. An error is raised to the next caller,
    and the reading is tried again.
    """

    def __init__(self, read: Callable[P, T], *, every_s: float, name: str) -> None:
        self._read = read
        self._every_s = every_s
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._reading: Future[tuple[T, float]] | None = None
        self._newest: tuple[T, float] | None = None
        """The result, and the processor time that it took."""
        self._read_at = 0.0

    @property
    def is_quick(self) -> bool:
        """True if the next due reading is done by the caller."""
        return self._newest is not None and self._newest[1] <= QUICK_S

    def newest(self, *asked: P.args, **named: P.kwargs) -> T:
        """Return the last result; if it is due, read again with these arguments."""
        with self._lock:
            if self._reading is not None and self._reading.done():
                reading, self._reading = self._reading, None
                self._note(reading.result())
            if self._newest is None or self._newest[0] is None:
                return self._note(self._timed(*asked, **named))
            found, took_s = self._newest
            if self._reading is None and time.monotonic() >= self._read_at + max(self._every_s, REST * took_s):
                if self.is_quick:
                    return self._note(self._timed(*asked, **named))
                self._reading = self._thread.submit(self._timed, *asked, **named)
            return found

    def _timed(self, *asked: P.args, **named: P.kwargs) -> tuple[T, float]:
        began_s = time.thread_time()
        return self._read(*asked, **named), time.thread_time() - began_s

    def _note(self, reading: tuple[T, float]) -> T:
        self._newest, self._read_at = reading, time.monotonic()
        return reading[0]
