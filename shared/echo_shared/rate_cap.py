"""A cap on a rate of bytes: a bucket that fills evenly, knows no clock, and lets nobody past who comes too soon."""

from __future__ import annotations

from typing import Final

BURST_S: Final = 0.1
"""What may go at once after a time in which nothing went, as a time at the full rate."""


class RateCap:
    """Bytes a second; 0 = no cap."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        """May change at any time: what has passed has been counted by what it was then."""
        self._paid_until = 0.0

    def delay_s(self, count_bytes: int, now: float) -> float:
        """How long to wait before so many bytes may go; they count as gone. First come, first served."""
        if not self.bytes_per_s:
            return 0.0
        self._paid_until = max(self._paid_until, now - BURST_S) + count_bytes / self.bytes_per_s
        return max(0.0, self._paid_until - now)
