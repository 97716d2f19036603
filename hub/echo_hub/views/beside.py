"""Cache slow readings. A background thread refreshes them, while callers get the last result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, ParamSpec, TypeVar

QUICK_S: Final = 0.02
"""A reading that takes at most this many processor seconds is quick. Then the caller itself reads, and gets a current
result."""
REST: Final = 200.0
"""Shortest time between two readings, as a multiple of the processor time of the last reading."""

P = ParamSpec("P")
T = TypeVar("T")


class ReadBeside(Generic[P, T]):
    """Caches the result of `read`. Thread-safe; only one reading runs at a time.

    The first callers wait until a reading returns something other than None. The next reading is due `every_s` after
    the last one, or `REST` times its processor time if that is longer. If readings are quick, the caller that finds a
    reading due does it. If they are slow, a background thread does it, and callers get the last result meanwhile. If
    the background thread fails, the next caller gets the error, and the reading is tried again.
    """

    def __init__(self, read: Callable[P, T], *, every_s: float, name: str) -> None:
        self._read = read
        self._every_s = every_s
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._reading: Future[tuple[T, float]] | None = None
        self._newest: tuple[T, float] | None = None
        """The last result, and the processor seconds that reading it took."""
        self._read_at = 0.0

    @property
    def is_quick(self) -> bool:
        """Return True if the next reading will be done by the caller that finds it due, not by the background
        thread."""
        return self._newest is not None and self._newest[1] <= QUICK_S

    def newest(self, *asked: P.args, **named: P.kwargs) -> T:
        """Return the last result. If the next reading is due, call `read` with these arguments."""
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
