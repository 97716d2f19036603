"""Streaks: numbers of consecutive days on which work of a node or a team counted.

A day is a UTC day by the hub's clock, numbered from 1970-01-01.
"""

from __future__ import annotations

from typing import Final

DAY_S: Final = 86_400.0


def day_of(at: float) -> int:
    """Return the number of the UTC day that contains time `at`."""
    return int(at // DAY_S)


def longer(streak_days: int, last_day: int | None, day: int) -> int:
    """Return the length of the streak after work on `day`. Before it, the streak had `streak_days` days, the last on
    `last_day`.
    """
    if last_day is None or day > last_day + 1:
        return 1
    return streak_days + 1 if day == last_day + 1 else streak_days


def current(streak_days: int, last_day: int | None, today: int) -> int:
    """Return the length of today's streak; 0 if yesterday and today have no counted work."""
    return streak_days if last_day is not None and last_day >= today - 1 else 0
