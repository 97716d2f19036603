"""Number of received rollouts without a verdict (a score or a refusal). The scorer writes it, the driver reads it."""

from __future__ import annotations

from typing import Final

FAR_BEHIND: Final = 2_048
"""Number of open rollouts above which nodes must wait: several times what is on its way to and from scoring
processes."""


class Backlog:
    """Counts the rollouts that were submitted to the scorer and have no verdict yet."""

    def __init__(self, *, is_limited: bool = True) -> None:
        """`is_limited`: False for a run with judges. Judges may be slow without being overloaded, so nodes never wait
        for them."""
        self.num_open = 0
        self._is_limited = is_limited

    @property
    def is_far(self) -> bool:
        """True if the scorer has so many open rollouts that more would not keep it any busier."""
        return self._is_limited and self.num_open > FAR_BEHIND
