"""Recent token rate of a node, from a count that only grows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

SPAN_S: Final = 10.0
LATELY: Final = 6
"""Number of `SPAN_S` spans in one minute."""
KEPT: Final = 30
"""Number of `SPAN_S` spans in five minutes."""


def lately(rates: Sequence[float]) -> float | None:
    """Return tokens per second over the last minute of `TokenHistory.rates`; None before the first full span."""
    newest = rates[-LATELY:]
    return sum(newest) / len(newest) if newest else None


class TokenHistory:
    """History of token rates. Call `note` regularly; `rates` holds the result."""

    def __init__(self) -> None:
        self._done: deque[float] = deque(maxlen=KEPT)
        self._began: float | None = None
        """Start of the current span; None before the first `note`."""
        self._count = 0
        """Count at the start of the current span."""

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second in each of the last `KEPT` full spans of `SPAN_S`, the oldest first."""
        return tuple(self._done)

    def note(self, count: int, now: float) -> None:
        """Record the count. `now` never decreases. Spans without a record share one average rate."""
        if self._began is None:
            self._began, self._count = now, count
            return
        spans = int((now - self._began) / SPAN_S)
        if spans:
            rate = (count - self._count) / (now - self._began)
            self._done.extend([rate] * min(spans, KEPT))
            self._began, self._count = now, count
