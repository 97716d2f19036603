"""How fast a node has drawn tokens lately, from a count that only grows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

SPAN_S: Final = 10.0
LATELY: Final = 6
"""Spans: a minute."""
KEPT: Final = 30
"""Spans: five minutes."""


def lately(rates: Sequence[float]) -> float | None:
    """Tokens per second over the last minute, of `TokenHistory.rates`; None: no span is over yet."""
    newest = rates[-LATELY:]
    return sum(newest) / len(newest) if newest else None


class TokenHistory:
    """`note` the count now and then; `rates` are what follows from it."""

    def __init__(self) -> None:
        self._done: deque[float] = deque(maxlen=KEPT)
        self._began: float | None = None
        """When the span that is under way began; None = nothing was noted yet."""
        self._count = 0
        """At its beginning."""

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second in each of the last `KEPT` full spans of `SPAN_S`, the oldest first."""
        return tuple(self._done)

    def note(self, count: int, now: float) -> None:
        """`now` never goes back. Where nothing was noted for several spans, all of them had the same rate."""
        if self._began is None:
            self._began, self._count = now, count
            return
        spans = int((now - self._began) / SPAN_S)
        if spans:
            rate = (count - self._count) / (now - self._began)
            self._done.extend([rate] * min(spans, KEPT))
            self._began, self._count = now, count
