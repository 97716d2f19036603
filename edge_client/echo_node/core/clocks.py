"""Detects from clocks that the machine slept or stood still, or that its time of day is wrong.

A monotonic clock, which users cannot set and which also counts sleep, measures elapsed time. Only the owner's pauses
and working hours use the time of day, which is therefore compared with the hub's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo_node.core.troubles import Trouble, TroubleCode

SLEPT_S: Final = 15.0
"""Seconds between two clock readings, beyond the planned interval, that count as sleep. A busy machine causes shorter
gaps.
"""
WRONG_S: Final = 120.0
"""Difference between this machine's and the hub's time of day, in seconds, that counts as a wrong clock. A slow answer
of the hub causes less.
"""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Readings of the monotonic clock and of the time of day at one moment, in seconds."""

    running: float
    """Monotonic clock that counts sleep. Only differences have a meaning."""
    wall: float
    """Time of day, since the epoch."""


class SleepSense:
    def __init__(self, look_s: float) -> None:
        """`look_s`: planned seconds between two clock readings."""
        self._look_s = look_s
        self._last: float | None = None

    def slept_s(self, reading: ClockReading) -> float:
        """Return the seconds of sleep or standstill since the previous reading; 0 = none."""
        last, self._last = self._last, reading.running
        gap_s = 0.0 if last is None else reading.running - last - self._look_s
        return gap_s if gap_s >= SLEPT_S else 0.0


class HubClock:
    """The hub's time of day, as its last message gave it."""

    def __init__(self) -> None:
        self._told: ClockReading | None = None

    def tell(self, wall: float, *, running: float) -> None:
        """Store the hub's time of day `wall`, which this node received at its monotonic time `running`."""
        self._told = ClockReading(running, wall)

    def ahead_s(self, reading: ClockReading) -> float:
        """Return by how many seconds this machine's time of day is ahead of the hub's time of day; 0 if the hub's is
        unknown.
        """
        if self._told is None:
            return 0.0
        return reading.wall - (self._told.wall + reading.running - self._told.running)

    def trouble(self, reading: ClockReading) -> Trouble | None:
        """Return a Trouble if this machine's time of day differs from the hub's by at least WRONG_S seconds."""
        ahead_s = self.ahead_s(reading)
        if abs(ahead_s) < WRONG_S:
            return None
        how = f"{in_words(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} the hub's"
        return Trouble(
            TroubleCode.CLOCK,
            f"This machine's clock is {how}: your pauses and hours are off by as much. Set the clock, or let the "
            "system fetch the time from the network.",
        )


def in_words(seconds: float) -> str:
    """Format seconds in the largest unit that gives a value of about 2 or more: "47 s", "2 min", "3 h" or "4 days"."""
    for unit_s, name in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 1.9 * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds:.0f} s"


def slept(seconds: float) -> Trouble:
    return Trouble(TroubleCode.SLEPT, f"This machine slept for {in_words(seconds)}; reconnecting.")
