"""Keeps Python's cyclic collector from holding the hub up.

Left alone, the collector looks through all objects that it knows, in one go: with the records of a hundred thousand
nodes that takes some tenths of a second, in which nobody is answered. Nor are its young ones few: it counts what is
made less what is freed, so that, while as much is freed as is made, they become ever more.

Nearly all of what a hub lets go of is freed by reference counts; what is left over, cycles, is almost always young. So
the young are looked through every `EVERY` events, and what has survived is taken from the collector (`gc.freeze`, which
costs nothing). Cycles that were old when they were let go of stay until memory has doubled: then, at last, everything
is looked through.
"""

from __future__ import annotations

import gc
import os
from types import TracebackType
from typing import Final, Self

from echo_shared.process_memory import own_bytes

EVERY: Final = 500
"""Events, each of which leaves behind some ten objects."""
LEAST_GROWTH: Final = 2**28
"""Bytes: for less it is not worth holding anybody up."""


class Garbage:
    """While it is entered, the process's collector works like that. `handled` is to be told of all events."""

    def __init__(self, least_growth: int = LEAST_GROWTH) -> None:
        self._least_growth = least_growth
        self._num_handled = 0
        self._bytes = 0
        """The process's memory when everything was last looked through."""

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
        if own_bytes(os.getpid()) >= self._bytes + max(self._bytes, self._least_growth):
            gc.unfreeze()
            self._look_through()
        else:
            gc.collect(1)
            gc.freeze()

    def _look_through(self) -> None:
        gc.collect()
        gc.freeze()
        self._bytes = own_bytes(os.getpid())
