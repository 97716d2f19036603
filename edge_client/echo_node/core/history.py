"""Recent token rate of a node, computed from its count of drawn tokens, which only grows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

SPAN_S: Final = 10.0
LATELY: Final = 6
"""Number of periods of `SPAN_S` seconds in one minute."""
KEPT: Final = 30
"""Number of periods of `SPAN_S` seconds in five minutes."""


def lately(rates: Sequence[float]) -> float | None:
    """Return the mean of `TokenHistory.rates` over the last minute, in tokens per second; None without rates."""
    newest = rates[-LATELY:]
    return sum(newest) / len(newest) if newest else None


class TokenHistory:
    """Token rates of the last minutes. Call `note` regularly with the token count."""

    def __init__(self) -> None:
        self._done: deque[float] = deque(maxlen=KEPT)
        self._began: float | None = None
        """Start of the current period of `SPAN_S` seconds; None before the first `note`."""
        self._count = 0
        """Token count at the start of the current period."""

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second in each of the last `KEPT` complete periods of `SPAN_S` seconds, oldest first."""
        return tuple(self._done)

    def note(self, count: int, now: float) -> None:
        """Record the token count at `now`, which must never decrease. Periods of `SPAN_S` seconds without a call share
        one average rate.
        """
        if self._began is None:
            self._began, self._count = now, count
            return
        spans = int((now - self._began) / SPAN_S)
        if spans:
            rate = (count - self._count) / (now - self._began)
            self._done.extend([rate] * min(spans, KEPT))
            self._began, self._count = now, count
