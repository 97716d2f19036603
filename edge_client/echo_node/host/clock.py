"""The clock by which the node measures time."""

from __future__ import annotations

import sys
import time

from echo_node.core.clocks import ClockReading


def running_s() -> float:
    """Seconds by a clock that never goes back and counts the time that the machine sleeps, too; its zero means nothing.

    Windows' `time.monotonic` does; Linux's does not, nor macOS's.
    """
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic()


def read_clocks() -> ClockReading:
    """Now."""
    return ClockReading(running_s(), time.time())
