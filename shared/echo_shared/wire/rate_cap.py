"""A byte rate limit as a token bucket without a clock: callers pass the time, and wait themselves."""

from __future__ import annotations

from typing import Final

BURST_S: Final = 0.1
"""Token-bucket burst, in seconds of the full rate."""


class RateCap:
    """Limit on the rate at which a caller sends, in bytes per second; 0 = no limit."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        """May change at any time. Bytes that are already counted keep the old rate."""
        self._paid_until = 0.0

    def delay_s(self, count_bytes: int, now: float) -> float:
        """Count `count_bytes` as sent, and return how many seconds the caller must wait before it sends them."""
        if not self.bytes_per_s:
            return 0.0
        self._paid_until = max(self._paid_until, now - BURST_S) + count_bytes / self.bytes_per_s
        return max(0.0, self._paid_until - now)
