"""Count of finished work, for a progress display. One thread counts; the display may read on another thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KNOWN_FROM: Final = 256
"""Number of finished units from which on the remaining time is estimated; a quarter of all units if that is less.
Before that, an estimate would be wrong: an engine that samples many completions in parallel finishes none for a
while."""


@dataclass(slots=True, kw_only=True, eq=False)
class WorkCount:
    """Number of finished units of work, and their speed."""

    doing: str
    """The work as a word, such as "Evaluating"."""
    units: str
    """The units' name, such as "completions"."""
    total: int = 0
    """Number of units in all; 0 = not known yet."""
    done: int = 0
    begun_at: float | None = None
    """Time at which the first unit began; None while the model is loaded."""
    done_before: int = 0
    """Number of units that an earlier process finished."""

    def begin(self, now: float) -> None:
        """Start measuring the speed. Only the first call counts."""
        if self.begun_at is None:
            self.begun_at, self.done_before = now, self.done

    def text(self, now: float) -> str:
        """Return a sentence such as "Evaluating: 96 of 512 completions, about 3 min left."."""
        if self.begun_at is None:
            return f"{self.doing}: loading {'the model' if self.total else 'the task'}."
        done, total = self.done, self.total
        known = f"{self.doing}: {done:,} of {total:,} {self.units}"
        finished, asked = done - self.done_before, total - self.done_before
        if finished < max(1.0, min(KNOWN_FROM, asked / 4)) or done >= total:
            return f"{known}."
        return f"{known}, about {_roughly((now - self.begun_at) * (total - done) / finished)} left."


def _roughly(seconds: float) -> str:
    if seconds < 55:
        return f"{max(10, round(seconds, -1)):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5_400 else f"{seconds / 3_600:.1f} h"
