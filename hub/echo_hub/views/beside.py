"""What takes long to read is read beside those who look: they are shown what was read last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, ParamSpec, TypeVar

QUICK_S: Final = 0.02
"""Of the processor: what takes no longer is read by who looks, so that it is of now."""
REST: Final = 200.0
"""Times what it took of the processor, until it is read again."""

P = ParamSpec("P")
T = TypeVar("T")


class ReadBeside(Generic[P, T]):
    """`read` may be asked on several threads at a time, and is done on one.

    The first reading that finds anything but None is waited for. The next is made no sooner than `every_s` later, nor
    than `REST` times what the one before took: if that was quick, by who asks then, else on a thread of its own, and
    what was found last is said meanwhile. What a reading fails with is raised to who asks next, and it is tried again.
    """

    def __init__(self, read: Callable[P, T], *, every_s: float, name: str) -> None:
        self._read = read
        self._every_s = every_s
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._reading: Future[tuple[T, float]] | None = None
        self._newest: tuple[T, float] | None = None
        """What was found, and what that took of the processor."""
        self._read_at = 0.0

    @property
    def is_quick(self) -> bool:
        """Whether what was found last is read by who asks, as soon as it is due."""
        return self._newest is not None and self._newest[1] <= QUICK_S

    def newest(self, *asked: P.args, **named: P.kwargs) -> T:
        """What was read last; if that is long ago, it is read with these arguments."""
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
