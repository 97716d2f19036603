"""Number of received rollouts without a verdict (a score or a refusal). The scorer updates this number, and the driver
reads it."""

from __future__ import annotations

from typing import Final

FAR_BEHIND: Final = 2_048
"""Number of rollouts without a verdict above which the hub stops to handle new events of nodes for a while. Pipes to
and from scoring processes hold only a fraction of this number."""


class Backlog:
    """Number of rollouts submitted to the scorer that still lack a verdict."""

    def __init__(self, *, is_limited: bool = True) -> None:
        """`is_limited` is False for a run with judges (models that score). A judge may be slow without being
        overloaded, so nodes never wait for judges."""
        self.num_open = 0
        self._is_limited = is_limited

    @property
    def is_far(self) -> bool:
        """True if nodes must wait, because the scorer's queue is long enough to keep all scoring processes busy."""
        return self._is_limited and self.num_open > FAR_BEHIND
