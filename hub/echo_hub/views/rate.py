"""How fast something goes on, over the last while."""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW_S: Final = 30.0


class Rate:
    """The rate of a number that only grows, from what it was when somebody looked."""

    def __init__(self, now: float) -> None:
        self._seen: deque[tuple[float, int]] = deque([(now, 0)])

    def per_s(self, number: int, now: float) -> float:
        """The rate since the oldest look of the last `WINDOW_S`, or since the look before where that is longer ago."""
        self._seen.append((now, number))
        while len(self._seen) > 2 and self._seen[0][0] < now - WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        return (number - before) / (now - since) if now > since else 0.0
