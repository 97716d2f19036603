"""What clocks say of their machine: that it slept or stood still, or that the time of day it shows is wrong.

Intervals are measured by a clock that nobody sets and that counts a sleep as well. The time of day serves pauses and
hours alone, which are the owner's, and is compared with the hub's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo_node.core.troubles import Trouble, TroubleCode

SLEPT_S: Final = 15.0
"""Between two looks, beyond what was meant to be between them: a machine that is merely busy is not so for so long."""
WRONG_S: Final = 120.0
"""Between this machine's time of day and the hub's: more than a slow answer makes."""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Both at one moment, in seconds."""

    running: float
    """By a clock that never goes back and goes on while the machine sleeps; its zero means nothing."""
    wall: float
    """Time of day, since the epoch."""


class SleepSense:
    """Looks at the clock again and again."""

    def __init__(self, look_s: float) -> None:
        """`look_s`: what is meant to be between two looks."""
        self._look_s = look_s
        self._last: float | None = None

    def slept_s(self, reading: ClockReading) -> float:
        """How long the machine slept, or this process was stopped, since the last look; 0 = it did not."""
        last, self._last = self._last, reading.running
        gap_s = 0.0 if last is None else reading.running - last - self._look_s
        return gap_s if gap_s >= SLEPT_S else 0.0


class HubClock:
    """The hub's time of day, as it told it last."""

    def __init__(self) -> None:
        self._told: ClockReading | None = None

    def tell(self, wall: float, *, running: float) -> None:
        """It says that it is `wall` now."""
        self._told = ClockReading(running, wall)

    def ahead_s(self, reading: ClockReading) -> float:
        """How far this machine's time of day is ahead of the hub's; 0 where the hub has told nothing."""
        if self._told is None:
            return 0.0
        return reading.wall - (self._told.wall + reading.running - self._told.running)

    def trouble(self, reading: ClockReading) -> Trouble | None:
        """That this machine's clock is wrong, if it is."""
        ahead_s = self.ahead_s(reading)
        if abs(ahead_s) < WRONG_S:
            return None
        how = f"{in_words(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} the hub's"
        return Trouble(
            TroubleCode.CLOCK,
            f"This machine's clock is {how}: pauses and hours that you have set are off by as much. Set it right;"
            " systems that fetch the time from the network do so by themselves.",
        )


def in_words(seconds: float) -> str:
    """In the largest unit of which there are nearly two, as "47 s", "2 min", "3 h" or "4 days"."""
    for unit_s, name in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 1.9 * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds:.0f} s"


def slept(seconds: float) -> Trouble:
    """That the machine slept for so long."""
    return Trouble(TroubleCode.SLEPT, f"This machine slept for {in_words(seconds)}; connecting again.")
