"""Milestones of a node or a team: powers of ten of rollouts, tokens and steps, and streaks of days."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from echo_shared.records.credit import CreditDay, CreditStanding

ROLLOUTS: Final = tuple(10**power for power in range(8))
TOKENS: Final = tuple(10**power for power in range(4, 13))
STEPS: Final = tuple(10**power for power in range(1, 7))
STREAKS: Final = (3, 7, 30, 100, 365, 1_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestone:
    text: str
    day: int | None = None
    """UTC day on which the milestone was reached, counted from 1970-01-01; None if not reached, or if the day is
    unknown.
    """
    reached: bool


def milestones(standing: CreditStanding, days: Sequence[CreditDay]) -> tuple[Milestone, ...]:
    """Return the reached milestones, and the next one of each kind."""
    # If earlier days are missing, the sums over the known days are too small, so the day of a milestone is unknown.
    is_whole = sum(day.rollouts for day in days) == standing.rollouts
    by_day = {"rollouts": [day.rollouts for day in days], "tokens": [day.tokens for day in days]}
    found = []
    for kind, marks in (("rollouts", ROLLOUTS), ("tokens", TOKENS), ("steps", STEPS)):
        total: int = getattr(standing, kind)
        sums = list(accumulate(by_day.get(kind, ()))) if is_whole else []
        for mark in marks:
            day = next((days[i].day for i, reached in enumerate(sums) if reached >= mark), None)
            what = kind.removesuffix("s") if mark == 1 else kind
            found.append(Milestone(text=f"{mark:,} {what}", day=day, reached=total >= mark))
            if total < mark:
                break
    for mark in STREAKS:
        is_reached = standing.longest_streak >= mark
        found.append(Milestone(text=f"{mark:,} days in a row", reached=is_reached))
        if not is_reached:
            break
    return tuple(found)
