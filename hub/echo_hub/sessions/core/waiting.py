"""Slots (places for open sessions): limits for the whole host and for each task. Also: tasks whose environment does not
answer.

Opening a session takes a slot, and the end of closing frees it. While an environment is away, one session at a time
tries to reach it, at growing intervals.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from echo_shared.process.backoff import backoff_s

FIRST_TRY_S: Final = 0.5
"""Delay in seconds before an environment that is away is tried again. The delay doubles with each failed try."""
LAST_TRY_S: Final = 30.0
"""Longest delay in seconds between two tries."""
LIMIT_HOLDS_S: Final = 300.0
"""Seconds for which the host keeps to the limit that a full environment has shown. Then it tries to open one session
more."""


@dataclass(slots=True, kw_only=True)
class _Place:
    """Slots of one task's environment, and whether the environment can be reached."""

    open: set[int] = field(default_factory=set)
    opening: set[int] = field(default_factory=set)
    """Sessions in `open` whose episode has not begun."""
    limit: int | None = None
    """Number of sessions that the environment accepts, if that is known; else None."""
    limit_until: float = 0.0
    away: str = ""
    """Why the environment is away; "" if it is not."""
    tries: int = 0
    """Number of tries that failed in a row."""
    try_at: float = 0.0
    """Earliest time of the next try, while the environment is away or had no slot."""


class Slots:
    """Counts the slots of all tasks, and decides when an environment that is away is tried again."""

    def __init__(self, tasks: Iterable[str], *, most: int) -> None:
        self._places = {task: _Place() for task in tasks}
        self._most = most

    @property
    def num_open(self) -> int:
        return sum(len(place.open) for place in self._places.values())

    @property
    def total(self) -> int:
        """Number of sessions that may be open now. A task whose environment is away has no slot."""
        return min(self._most, sum(self._limit(place) for place in self._places.values()))

    def _limit(self, place: _Place) -> int:
        if place.away:
            return 0
        return self._most if place.limit is None else place.limit

    @property
    def absence(self) -> str:
        """Return which environments are away, and why."""
        return "; ".join(
            f"{task} is away: {place.away}" if task else place.away
            for task, place in self._places.items()
            if place.away
        )

    @property
    def all_taken(self) -> bool:
        return self.num_open >= self._most

    def may_open(self, task: str, now: float) -> bool:
        place = self._places[task]
        if self.all_taken or now < place.try_at:
            return False
        if place.away:
            return not place.opening
        return place.limit is None or len(place.open) < place.limit + (now >= place.limit_until)

    def taken(self, task: str, session: int) -> None:
        self._places[task].open.add(session)
        self._places[task].opening.add(session)

    def freed(self, task: str, session: int) -> None:
        place = self._places[task]
        place.open.discard(session)
        place.opening.discard(session)

    def opened(self, task: str, session: int) -> None:
        """Record a session that has begun its episode. So the environment answers, and has a slot for each open
        session.
        """
        place = self._places[task]
        place.opening.discard(session)
        place.away, place.tries, place.try_at = "", 0, 0.0
        if place.limit is not None:
            place.limit = max(place.limit, len(place.open))

    def is_away(self, task: str, why: str, now: float, luck: float) -> None:
        """Record that the environment does not answer. `luck`, random in [0, 1), spreads the tries over time."""
        place = self._places[task]
        is_known = place.away and now < place.try_at  # Other sessions failed in the same try.
        place.away = why
        if not is_known:
            self._wait(place, now, luck)

    def is_full(self, task: str, session: int, most: int | None, now: float, luck: float) -> None:
        """Record that the environment has no slot for this session. `most` is its number of slots, if it says so."""
        place = self._places[task]
        others = len(place.open - {session})
        place.away = ""
        place.limit = max(1, others if most is None else most)
        place.limit_until = now + LIMIT_HOLDS_S
        if others < place.limit:
            self._wait(place, now, luck)

    def _wait(self, place: _Place, now: float, luck: float) -> None:
        place.try_at = now + backoff_s(place.tries, luck, first_s=FIRST_TRY_S, limit_s=LAST_TRY_S)
        place.tries += 1

    def next_try_at(self, tasks: Iterable[str], now: float) -> float | None:
        """Return when the first of these tasks may be tried again; None if none of them waits for a time."""
        times = [self._places[task].try_at for task in tasks]
        later = [at for at in times if at > now]
        return min(later, default=None)
