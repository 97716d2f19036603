"""The queue of future events in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any


class Agenda:
    """Future calls in order of time; at equal times, in order of insertion. `now` is the virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._number = 0

    @property
    def next_at(self) -> float:
        """Virtual time of the next entry; inf if there is none."""
        return self._entries[0][0] if self._entries else inf

    def at(self, moment: float, do: Callable[[Any], None], subject: Any) -> None:
        """Schedule `do(subject)` at `moment`, which must not be in the past."""
        self._number += 1
        heappush(self._entries, (moment, self._number, do, subject))

    def advance(self) -> None:
        self.now, _, do, subject = heappop(self._entries)
        do(subject)
