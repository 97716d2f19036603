"""Classes of nodes' speeds, and of lengths of completions: values of one class differ by less than a factor of 1.5."""

from __future__ import annotations

from math import exp, floor, log
from typing import Final

_CLASS: Final = log(1.5)
"""Width of a speed class in ln(seconds per token): within one class, times differ by less than a factor of 1.5."""
_FASTEST_S: Final = 1e-9
_SLOWEST_S: Final = 1e9
"""Shortest and longest seconds per token that are told apart; values beyond them fall into the outermost classes."""


def speed_class(token_s: float) -> int:
    """Return the speed class of a node that needs `token_s` seconds per token within one completion; smaller is
    faster."""
    return floor(
        log(token_s if _FASTEST_S < token_s < _SLOWEST_S else min(max(token_s, _FASTEST_S), _SLOWEST_S)) / _CLASS
    )


def slowest_token_s(speed: int) -> float:
    """Return the upper bound of seconds per token in this speed class."""
    return exp(_CLASS * (speed + 1))
