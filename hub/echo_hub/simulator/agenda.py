"""What is going to happen in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any


class Agenda:
    """In order of time, and at the same moment in the order in which it was put there. It alone moves `now`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._number = 0

    @property
    def next_at(self) -> float:
        """inf: nothing is left."""
        return self._entries[0][0] if self._entries else inf

    def at(self, moment: float, do: Callable[[Any], None], subject: Any) -> None:
        """`do(subject)` is called at `moment`, which is not before now."""
        self._number += 1
        heappush(self._entries, (moment, self._number, do, subject))

    def advance(self) -> None:
        """Moves to the next entry and does it."""
        self.now, _, do, subject = heappop(self._entries)
        do(subject)
