"""Run Python's cyclic garbage collector at times when it does not hold up the hub.

By default a collection traverses all tracked objects at once. With the records of a hundred thousand nodes that takes
some tenths of a second, in which the hub answers no message. Python starts a collection by the count of allocations
minus deallocations, so a process that frees objects as fast as it makes them collects too rarely.

Reference counts free nearly all objects of a hub. The rest are cycles, and almost all of them are young. So the young
generations are collected every `EVERY` events, and the survivors are frozen (`gc.freeze`, which costs nothing). Old
cycles, such as those of a closed connection with pending requests, stay until a full collection. A full collection runs

  if it is cheap             whenever memory has grown by `SMALL_GROWTH` since the last one, so that strangers cannot
                             make a small hub keep much; it takes at most `SHARE` of the processor
  at a quiet moment          if memory has grown by `LEAST_GROWTH`, because no message waits
  under load                 only if memory has grown by the machine's free memory, or by `MOST_GROWTH`. Growth
                             alone is no reason: a hub grows as it meets more nodes
"""

from __future__ import annotations

import gc
import os
import time
from types import TracebackType
from typing import Final, Self

from echo_shared.process.process_memory import left_bytes, own_bytes

EVERY: Final = 500
"""Number of handled events between two collections of the young generations; each event leaves some ten objects."""
SOON_S: Final = 0.2
"""Processor seconds up to which a full collection counts as cheap. The duration of the last one decides."""
SMALL_GROWTH: Final = 2**25
"""Growth of memory, in bytes, after which a cheap full collection runs."""
SHARE: Final = 0.02
"""Largest share of the thread's processor time that cheap full collections may take."""
LEAST_GROWTH: Final = 2**28
"""Growth of memory, in bytes, from which on a full collection may run that is not cheap. After less growth it would
free too little."""
MOST_GROWTH: Final = 2**32
"""Growth of memory, in bytes, after which a full collection runs even if the machine has more free memory: a container
may have a lower limit."""


class Garbage:
    """Context manager inside which Python's collector runs at the times that this module describes."""

    def __init__(self) -> None:
        self._num_handled = 0
        self._bytes = 0
        """Memory of the process after the last full collection."""
        self._took_s = 0.0
        """Processor seconds of the last full collection."""
        self._ended_at = 0.0
        """End of the last full collection, in the thread's processor time."""

    def __enter__(self) -> Self:
        self._collect_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        gc.unfreeze()

    def handled(self, num_events: int) -> None:
        """Count handled events, and collect if EVERY events have been handled since the last collection."""
        self._num_handled += num_events
        if self._num_handled < EVERY:
            return
        self._num_handled = 0
        grown = self._grown_bytes
        is_cheap = self._took_s <= SOON_S and self._took_s <= SHARE * (time.thread_time() - self._ended_at)
        is_soon_done = is_cheap and grown >= SMALL_GROWTH
        if is_soon_done or (grown >= LEAST_GROWTH and grown >= min(left_bytes(), MOST_GROWTH)):
            self._collect_frozen()
        else:
            gc.collect(1)
            gc.freeze()

    def quiet(self) -> None:
        """Run a full collection if memory has grown by `LEAST_GROWTH`. Call it when no event has come for a while."""
        if self._grown_bytes >= LEAST_GROWTH:
            self._collect_frozen()

    @property
    def _grown_bytes(self) -> int:
        return own_bytes(os.getpid()) - self._bytes

    def _collect_frozen(self) -> None:
        gc.unfreeze()
        self._collect_all()

    def _collect_all(self) -> None:
        began_at = time.thread_time()
        gc.collect()
        gc.freeze()
        self._ended_at = time.thread_time()
        self._took_s = self._ended_at - began_at
        self._bytes = own_bytes(os.getpid())
