"""Delays before retries, and before restarts of dead processes."""

from __future__ import annotations


def backoff_s(attempt: int, jitter: float, *, first_s: float = 1.0, limit_s: float = 60.0) -> float:
    """Return the wait before retry number `attempt` (0 = first retry) in seconds: doubled each time, up to `limit_s`.

    `jitter` in [0, 1) shortens the wait by up to half, which spreads reconnects of many nodes.
    """
    return min(limit_s, first_s * 2.0 ** min(attempt, 30)) * (1.0 - jitter / 2.0)


class Restarts:
    """Delays between restarts of a process that keeps dying. Each delay is longer than the last, up to `limit_s`
    seconds.
    """

    def __init__(self, *, most: int, first_s: float, limit_s: float) -> None:
        """`most`: number of consecutive deaths after which restarts end."""
        self.deaths = 0
        """Deaths since the process last succeeded."""
        self._most = most
        self._first_s = first_s
        self._limit_s = limit_s

    def succeeded(self) -> None:
        self.deaths = 0

    def died(self, jitter: float) -> float | None:
        """Return the wait before the next restart in seconds; None after too many deaths in a row. `jitter`: see
        `backoff_s`.
        """
        self.deaths += 1
        if self.deaths >= self._most:
            return None
        return backoff_s(self.deaths - 1, jitter, first_s=self._first_s, limit_s=self._limit_s)
