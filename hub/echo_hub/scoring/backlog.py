"""Number of received rollouts without a verdict: the scorer writes it, the driver reads it."""

from __future__ import annotations

from typing import Final

FAR_BEHIND: Final = 2_048
"""Rollouts; several times the number in transit to and from scoring processes."""


class Backlog:
    """Rollouts that were submitted to the scorer and have no verdict yet."""

    def __init__(self, *, is_limited: bool = True) -> None:
        """`is_limited`: False for a run with judges, which may be slow without being behind."""
        self.num_open = 0
        self._is_limited = is_limited

    @property
    def is_far(self) -> bool:
        """True if more rollouts in the scorer's queue would not help."""
        return self._is_limited and self.num_open > FAR_BEHIND
