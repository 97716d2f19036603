"""The node's clock for measuring how much time has passed."""

from __future__ import annotations

import sys
import time

from echo_node.core.clocks import ClockReading


def running_s() -> float:
    """Return seconds of a monotonic clock that counts sleep. Only differences have a meaning.

    `time.monotonic` counts sleep on Windows, but not on Linux and macOS.
    """
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic()


def read_clocks() -> ClockReading:
    return ClockReading(running_s(), time.time())
