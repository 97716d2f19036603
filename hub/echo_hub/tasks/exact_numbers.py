"""Exact results of factorials, binomials, powers and other functions of rational numbers, with bounds on size."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from math import floor, gcd, isqrt, lcm
from typing import TYPE_CHECKING, Any, Final

from echo_hub.tasks.math_tokens import NotUnderstood

if TYPE_CHECKING:
    pass


MOST_BITS: Final = 60_000
"""Largest size of an exact number, in bits. A larger number takes too long to compute."""


_MOST_FACTORIAL: Final = 5_000


_MOST_ROOT: Final = 64
"""Largest index n of an n-th root. A larger denominator in an exponent comes from the irregular values that variables
get in comparisons (`math_values`), not from a root that the answer contains."""


class TooMuch(NotUnderstood):
    """The computation would exceed a limit on the size of numbers or on the amount of work."""


class Undefined(Exception):
    """The expression has no value at this point."""


def is_whole_number(number: Any) -> bool:
    return isinstance(number, Fraction) and number.denominator == 1


def whole_number(number: Fraction) -> int:
    if number.denominator != 1:
        raise Undefined("The number is not whole.")
    return number.numerator


def _factorial(number: Fraction) -> int:
    whole = whole_number(number)
    if whole < 0:
        raise Undefined("A negative number has no factorial.")
    if whole > _MOST_FACTORIAL:
        raise TooMuch(f"The factorial is beyond {_MOST_FACTORIAL:,}!")
    return _factorials(whole)


@lru_cache(64)
def _factorials(number: int) -> int:
    from math import factorial

    return factorial(number)


def _binomial(above: Fraction, below: Fraction) -> int:
    from math import comb

    of, chosen = whole_number(above), whole_number(below)
    if of < 0 or chosen < 0:
        raise Undefined("Negative numbers have no binomial.")
    if of > _MOST_FACTORIAL:
        raise TooMuch(f"The binomial has an argument beyond {_MOST_FACTORIAL:,}.")
    return comb(of, chosen)


EXACT_FUNCTIONS: Final[Mapping[str, Any]] = {
    "abs": abs,
    "max": max,
    "min": min,
    "floor": floor,
    "ceiling": lambda number: -floor(-number),
    "factorial": _factorial,
    "binomial": _binomial,
    "gcd": lambda *numbers: gcd(*map(whole_number, numbers)),
    "lcm": lambda *numbers: lcm(*map(whole_number, numbers)),
}


def exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Return a rational power as an exact number. Return None if the power is irrational or too large."""
    if exponent.denominator > _MOST_ROOT:
        return None
    if not base:
        if exponent <= 0:
            raise Undefined("0 to this power is not defined.")
        return base
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and bits * abs(exponent) > 4 * MOST_BITS:
        if exponent.denominator == 1:
            raise TooMuch("The power has more than 18,000 digits.")
        return None
    if exponent.denominator > 1:
        if base < 0 and exponent.denominator % 2 == 0:
            return None
        roots = [_root(abs(part), exponent.denominator) for part in (base.numerator, base.denominator)]
        if roots[0] is None or roots[1] is None:
            return None
        base = Fraction(roots[0] if base > 0 else -roots[0], roots[1])
    if abs(base) == 1:
        return base if exponent.numerator % 2 else Fraction(1)
    return base**exponent.numerator


def _root(number: int, index: int) -> int | None:
    if index == 2:
        found = isqrt(number)
    else:
        low, high = 0, 1 << (number.bit_length() // index + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if middle**index <= number else (low, middle - 1)
        found = low
    return found if found**index == number else None
