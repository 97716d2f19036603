"""Processor load of other programs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import psutil

SHORTEST_S: Final = 0.5
"""Minimum seconds between two readings, because the system counts processor time in hundredths of a second."""


class OthersLoad:
    """Measures the share of all cores that other programs used since the previous reading. This node and programs of
    low priority do not count.
    """

    def __init__(self) -> None:
        self._seen_at = 0.0
        self._busy_s = self._own_s = 0.0
        self._share: float | None = None

    def share(self, engines: Iterable[int]) -> float | None:
        """Return the share of the processor that other programs use; None at the first reading. `engines`: other
        processes of this node.
        """
        now = time.monotonic()
        if self._seen_at and now - self._seen_at < SHORTEST_S:
            return self._share
        busy_s, own_s, since = _busy_s(), sum(map(_counted_s, (os.getpid(), *engines))), self._seen_at
        if since:
            cores = psutil.cpu_count() or 1
            # Clip at 0: the total falls when an engine has ended.
            others_s = (busy_s - self._busy_s) - max(0.0, own_s - self._own_s)
            self._share = min(1.0, max(0.0, others_s / (now - since) / cores))
        self._seen_at, self._busy_s, self._own_s = now, busy_s, own_s
        return self._share


def _busy_s() -> float:
    """Return the busy seconds of all cores since the system's start, without programs of low priority."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - sum(getattr(times, name, 0.0) for name in _NOT_OTHERS))


_NOT_OTHERS: Final = ("iowait", "nice", "guest", "guest_nice", "steal")
"""Times that do not count: waiting, programs of low priority, guests (already counted in `user`), other virtual
machines.
"""


def _counted_s(pid: int) -> float:
    """Return the part of `_busy_s` that this process caused. Linux counts the computing time of niced processes
    separately.
    """
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        times = process.cpu_times()
        return float(times.system if sys.platform != "win32" and process.nice() > 0 else times.user + times.system)
    return 0.0
