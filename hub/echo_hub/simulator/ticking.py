"""When the coordinator is told the time."""

from __future__ import annotations

from math import inf, nextafter
from typing import Final

TICK_S: Final = 1.0


def next_tick(coordinator: object, last_tick: float) -> float:
    """As the coordinator says itself, or each second where it does not say; inf: not as long as nothing happens."""
    due_at = getattr(coordinator, "due_at", None)
    if due_at is None:
        return last_tick + TICK_S
    due: float | None = due_at()
    return inf if due is None else max(due, nextafter(last_tick, inf))
