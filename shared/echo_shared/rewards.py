"""When rewards count as equal: the ledger's and the learner's groups without advantage are the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

RELATIVE_TOLERANCE: Final = 1e-9
"""Far above float64's rounding, far below any difference that a task means: 0.1 + 0.2 and 0.3 are equal."""


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ by no more than rounding; true of none and of one."""
    if not rewards:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= RELATIVE_TOLERANCE * max(1.0, abs(low), abs(high))
