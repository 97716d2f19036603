"""The node's clocks: for measuring how much time has passed, and the owner's time of day."""

from __future__ import annotations

import sys
import time
from datetime import datetime

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


def local_now() -> datetime:
    """Return the time of day in the machine's current time zone.

    On Linux, a process keeps the time zone of its start unless it calls `tzset`: a laptop that travels would keep the
    working hours of its home.
    """
    if sys.platform != "win32":
        time.tzset()
    return datetime.now().astimezone()
