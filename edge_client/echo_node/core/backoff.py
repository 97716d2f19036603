"""How long to wait before trying again."""

from __future__ import annotations


def backoff_s(attempt: int, jitter: float, *, first_s: float = 1.0, limit_s: float = 60.0) -> float:
    """The wait before retry number `attempt` (0 = the first): doubled each time up to `limit_s`, then halved or less.

    `jitter` in [0, 1) takes up to half of it away, so that many nodes do not come back in the same instant.
    """
    return min(limit_s, first_s * 2.0 ** min(attempt, 30)) * (1.0 - jitter / 2.0)
