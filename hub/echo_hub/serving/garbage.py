"""Keeps Python's cyclic collector from holding the hub up.

Left alone, the collector looks through all objects that it knows, in one go: with the records of a hundred thousand
nodes that takes some tenths of a second, in which nobody is answered. Nor are its young ones few: it counts what is
made less what is freed, so that, while as much is freed as is made, they become ever more.

Nearly all of what a hub lets go of is freed by reference counts; what is left over, cycles, is almost always young. So
the young are looked through every `EVERY` events, and what has survived is taken from the collector (`gc.freeze`, which
costs nothing). Cycles that were old when they were let go of, as of a connection that was cut off with requests waiting
on it, stay until everything is looked through. It is done

    where it is soon done      whenever memory has grown by `SMALL_GROWTH` since the last time: of a hub that knows few
                               nodes, so that strangers cannot have it keep much; for a share of all work at most
    at a quiet moment          if memory has grown by `LEAST_GROWTH`: nobody waits for an answer
    while there is work        only when memory has grown by more than the machine has left, or by `MOST_GROWTH`: that a
                               hub has grown is no reason by itself, for it has come to know more nodes
"""

from __future__ import annotations

import gc
import os
import time
from types import TracebackType
from typing import Final, Self

from echo_shared.process_memory import left_bytes, own_bytes

EVERY: Final = 500
"""Events, each of which leaves behind some ten objects."""
SOON_S: Final = 0.2
"""Of processor."""
SMALL_GROWTH: Final = 2**25
"""Bytes."""
SHARE: Final = 0.02
"""Of the processor's time that the thread takes for all else, since the last time."""
LEAST_GROWTH: Final = 2**28
"""Bytes: for less it is not worth holding anybody up."""
MOST_GROWTH: Final = 2**32
"""Bytes: a container may be allowed less than its machine has left."""


class Garbage:
    """While it is entered, the process's collector works like that."""

    def __init__(self) -> None:
        self._num_handled = 0
        self._bytes = 0
        """The process's memory when everything was last looked through."""
        self._took_s = 0.0
        """Processor seconds that this took."""
        self._ended_at = 0.0
        """By the thread's processor time."""

    def __enter__(self) -> Self:
        self._look_through()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        gc.unfreeze()

    def handled(self, num_events: int) -> None:
        """So many more events have been handled."""
        self._num_handled += num_events
        if self._num_handled < EVERY:
            return
        self._num_handled = 0
        grown = self._grown_bytes
        is_cheap = self._took_s <= SOON_S and self._took_s <= SHARE * (time.thread_time() - self._ended_at)
        is_soon_done = is_cheap and grown >= SMALL_GROWTH
        if is_soon_done or (grown >= LEAST_GROWTH and grown >= min(left_bytes(), MOST_GROWTH)):
            self._look_through_all()
        else:
            gc.collect(1)
            gc.freeze()

    def quiet(self) -> None:
        """Nothing has happened for a while."""
        if self._grown_bytes >= LEAST_GROWTH:
            self._look_through_all()

    @property
    def _grown_bytes(self) -> int:
        return own_bytes(os.getpid()) - self._bytes

    def _look_through_all(self) -> None:
        """Also at what was taken from the collector."""
        gc.unfreeze()
        self._look_through()

    def _look_through(self) -> None:
        began_at = time.thread_time()
        gc.collect()
        gc.freeze()
        self._ended_at = time.thread_time()
        self._took_s = self._ended_at - began_at
        self._bytes = own_bytes(os.getpid())
