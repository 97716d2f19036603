"""How long to wait before trying again, and before starting again what has died."""

from __future__ import annotations

import math
from collections.abc import Callable


def backoff_s(attempt: int, jitter: float, *, first_s: float = 1.0, limit_s: float = 60.0) -> float:
    """The wait before retry number `attempt` (0 = the first): doubled each time up to `limit_s`, then halved or less.

    `jitter` in [0, 1) takes up to half of it away, so that many nodes do not come back in the same instant.
    """
    return min(limit_s, first_s * 2.0 ** min(attempt, 30)) * (1.0 - jitter / 2.0)


class Restarts:
    """When what dies again and again is started again: sooner at first, later each time, in the end not at all.

    Knows no clock: who asks has waited, and says how long the dead one had lived.
    """

    def __init__(
        self,
        *,
        most: int,
        first_s: float,
        limit_s: float,
        jitter: Callable[[], float],
        steady_s: float = math.inf,
    ) -> None:
        """`most` deaths in a row are the end; one that lived for `steady_s` or longer begins a new row."""
        self.deaths = 0
        """In a row."""
        self._most = most
        self._first_s = first_s
        self._limit_s = limit_s
        self._jitter = jitter
        self._steady_s = steady_s

    def succeeded(self) -> None:
        """What runs has done what it is for: deaths before that no longer count."""
        self.deaths = 0

    def died(self, *, lived_s: float = 0.0) -> float | None:
        """How long to wait before the next start; None = it has died too often in a row."""
        if lived_s >= self._steady_s:
            self.deaths = 0
        self.deaths += 1
        if self.deaths >= self._most:
            return None
        return backoff_s(self.deaths - 1, self._jitter(), first_s=self._first_s, limit_s=self._limit_s)
