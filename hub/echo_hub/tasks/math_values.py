"""Compare two expressions at points where the expected expression has a real value.

Rational numbers are computed exactly. Other values differ if they are at least 10^-(2 s + 40) apart, where 10^s or
10^-s is the most extreme size of any part, so `\\pi + 10^{-100}` is not `\\pi`. In both expressions, variables get the
same irregular numbers: positive, negative and whole ones. Expressions are never expanded or simplified. The work is
bounded: `TooMuch` is raised before the work exceeds the bound.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil, log10
from typing import TYPE_CHECKING, Any, Final

from echo_hub.tasks.exact_numbers import (
    _MOST_ROOT,
    EXACT_FUNCTIONS,
    MOST_BITS,
    TooMuch,
    Undefined,
    exact_power,
    is_whole_number,
    whole_number,
)
from echo_hub.tasks.math_tokens import COUNTER

if TYPE_CHECKING:
    from sympy import Basic

_DIGITS: Final = 70
_BEYOND: Final = 40
_DECIMALS: Final = 50
_LARGEST: Final = 500
"""Largest power of ten of an inexact number: e^{1000}, about 10^434, is allowed."""
_MOST_WORK: Final = 150_000.0
"""Largest amount of work for one answer, counted in additions of numbers of 70 digits. This amount takes less than half
a second."""
_MOST_GAMMA: Final = 200
_MOST_TERMS: Final = 300
_NUM_POINTS: Final = 6
_NUM_WHOLE_POINTS: Final = 12
_NEEDED: Final = 4
"""Number of points at which two expressions with variables must agree."""


@dataclass(slots=True)
class WorkBudget:
    """Work that one answer may still cost."""

    left: float = _MOST_WORK


_WORK: Final[ContextVar[WorkBudget | None]] = ContextVar("math_work", default=None)


@contextmanager
def bounded_work() -> Iterator[None]:
    """Limit the work of all comparisons inside the block together. A limit for each single comparison is not enough,
    because lists compare every item with every other item."""
    token = _WORK.set(WorkBudget())
    try:
        yield
    finally:
        _WORK.reset(token)


class Arithmetic:
    """Evaluates expressions with a given working precision, within a bound on the total work."""

    def __init__(self, digits: int = _DIGITS, *, largest: float = _LARGEST) -> None:
        self._digits = digits
        self._largest = largest
        self._price = (digits / _DIGITS) ** 1.6
        self._work = _WORK.get() or WorkBudget()
        self.least: Any = None
        """Differences below this value are rounding errors; None if all values so far are exact."""
        self.is_real = True
        """False as soon as any part of the expression has a value with an imaginary part."""
        self.scale = 0.0
        """Largest absolute value of log10 among the inexact parts so far and the exact numbers combined with them."""

    @cached_property
    def _mp(self) -> Any:
        from mpmath import MPContext

        context = MPContext()
        context.dps = self._digits
        return context

    def value(self, expression: Basic, point: Mapping[str, Fraction]) -> Any:
        """Return the expression's value at a point, as a Fraction or a number of mpmath. Raises Undefined and
        TooMuch."""
        from sympy import Add, Mul, Pow, Rational, Symbol

        if isinstance(expression, Rational):
            return self._kept(Fraction(int(expression.p), int(expression.q)))
        if isinstance(expression, Symbol):
            return self._constant(expression.name, point)
        if type(expression).__name__ in ("sum", "product"):
            return self._repeated(expression, point)
        parts = [self.value(part, point) for part in expression.args]
        try:
            if isinstance(expression, Add | Mul):
                return self._folded(parts, is_sum=isinstance(expression, Add))
            if isinstance(expression, Pow):
                return self._kept(self._power(*parts))
            return self._kept(self._function(type(expression).__name__, parts))
        except (ZeroDivisionError, ValueError, OverflowError) as error:
            raise Undefined(str(error)) from error

    def _repeated(self, expression: Basic, point: Mapping[str, Fraction]) -> Any:
        """Compute a sum or a product term by term. Raises Undefined unless its bounds are whole."""
        term, counter, *ends = expression.args
        low, high = (
            whole_number(end) if isinstance(end, Fraction) else None for end in (self.value(e, point) for e in ends)
        )
        if low is None or high is None:
            raise Undefined("The bounds are not whole.")
        if high - low > _MOST_TERMS:
            raise TooMuch(f"The sum has more than {_MOST_TERMS} terms.")
        is_sum = type(expression).__name__ == "sum"
        terms = [self.value(term, {**point, counter.name: Fraction(number)}) for number in range(low, high + 1)]
        return self._folded([Fraction(0 if is_sum else 1), *terms], is_sum=is_sum)

    def _constant(self, name: str, point: Mapping[str, Fraction]) -> Any:
        match name:
            case r"\pi":
                return self._mp.pi + 0
            case "e":
                return self._mp.e + 0
            case "i":
                self.is_real = False
                return self._mp.mpc(0, 1)
        return point[name]

    def refined(self) -> Arithmetic:
        """Return an Arithmetic with more digits: enough for the sizes of all parts that this object has computed."""
        scale = ceil(self.scale)
        found = Arithmetic(4 * scale + _DIGITS, largest=10 * _LARGEST)
        found.least = found._mp.mpf(10) ** -(2 * scale + _BEYOND)
        return found

    def rounded(self, number: Any, decimals: int) -> int:
        """Return the number in units of 10**-decimals, rounded to a whole number."""
        return int(self._mp.nint(number * self._mp.mpf(10) ** decimals))

    def _folded(self, parts: Sequence[Any], *, is_sum: bool) -> Any:
        total, *rest = parts
        for part in rest:
            if not (isinstance(total, Fraction) and isinstance(part, Fraction)):
                total, part = self._inexact(total), self._inexact(part)
            total = self._kept(total + part if is_sum else total * part)
        return total

    def _kept(self, number: Any) -> Any:
        """Check a number against the bounds, and return it. An imaginary part that is only a rounding error is
        removed."""
        if isinstance(number, Fraction):
            bits = max(number.numerator.bit_length(), number.denominator.bit_length())
            self._pay(1 + bits / 1_000)
            if bits > MOST_BITS:
                raise TooMuch("A number has more than 18,000 digits.")
            return number
        self._pay(1)
        if not self._mp.isfinite(number):
            raise Undefined("The number is infinite.")
        if isinstance(number, self._mp.mpc):
            if number.imag != 0 and abs(number.imag) > abs(number) * self._mp.mpf(10) ** (8 - self._mp.dps):
                self.is_real = False
            else:
                number = number.real
        self._note(self._power_of_ten(number))
        return number

    def _power_of_ten(self, number: Any) -> float:
        """Return an approximation of log10 of an inexact number. Return 0 for 0."""
        return float(self._mp.mag(number)) * log10(2) if number else 0.0

    def _note(self, power: float) -> None:
        self.scale = max(self.scale, abs(power))
        if self.scale > self._largest:
            raise TooMuch(f"A number is beyond 10^{_LARGEST}.")

    def _pay(self, price: float) -> None:
        self._work.left -= price * self._price
        if self._work.left < 0:
            raise TooMuch("The work for this answer exceeds its bound.")

    def _inexact(self, number: Any) -> Any:
        if not isinstance(number, Fraction):
            return number
        if number:
            self._note((abs(number.numerator).bit_length() - number.denominator.bit_length()) * log10(2))
        return self._mp.mpf(number.numerator) / number.denominator

    def _power(self, base: Any, exponent: Any) -> Any:
        if isinstance(base, Fraction) and isinstance(exponent, Fraction):
            found = exact_power(base, exponent)
            if found is not None:
                return found
        if base == 0:
            if isinstance(exponent, Fraction) and exponent > 0:
                return Fraction(0)
            raise Undefined("0 to this power is not defined.")
        base = self._inexact(base)
        if isinstance(exponent, Fraction) and exponent.denominator == 1 and abs(exponent) < 10**6:
            self._pay(20)
            self._note(self._power_of_ten(base) * int(exponent))
            return base ** int(exponent)
        self._note(self._power_of_ten(base) * min(float(abs(self._inexact(exponent))), 1e9))
        self._pay(30)
        is_negative = not isinstance(base, self._mp.mpc) and base < 0
        is_root = isinstance(exponent, Fraction) and exponent.denominator <= _MOST_ROOT
        if is_negative and is_root and exponent.denominator % 2:
            size = self._mp.power(-base, self._inexact(exponent))  # Take the real root of a negative number.
            return size if exponent.numerator % 2 == 0 else -size
        if is_negative:
            base = self._mp.mpc(base)
        return self._mp.power(base, self._inexact(exponent))

    def _function(self, name: str, arguments: Sequence[Any]) -> Any:
        if name in ("factorial", "binomial") and any(not is_whole_number(one) for one in arguments):
            return self._between_whole(name, [self._inexact(one) for one in arguments])
        if name in EXACT_FUNCTIONS:
            if not all(isinstance(one, Fraction) for one in arguments):
                return self._rounded(name, arguments)
            return Fraction(EXACT_FUNCTIONS[name](*arguments))
        numbers = [self._inexact(one) for one in arguments]
        self._pay(40)
        if name == "exp":
            self._note(min(abs(float(self._mp.re(numbers[0]))), 1e9) * log10(2.718281828459045))
        if name in ("sinh", "cosh", "tanh", "coth") or (name in ("sin", "cos", "tan") and not self.is_real):
            self._note(min(abs(float(abs(numbers[0]))), 1e9) * log10(2.718281828459045))
        if name == "log" and len(numbers) == 1:
            numbers.append(self._mp.mpf(10))
        if name in ("ln", "log") and any(one == 0 for one in numbers):
            raise Undefined("0 has no logarithm.")
        return getattr(self._mp, _NAMES.get(name, name))(*numbers)

    def _between_whole(self, name: str, numbers: Sequence[Any]) -> Any:
        """Compute factorials and binomials of numbers that are not whole, by the gamma function."""
        if any(isinstance(one, self._mp.mpc) for one in numbers):
            raise Undefined("The number is not real.")
        if any(abs(one) > _MOST_GAMMA for one in numbers):
            raise TooMuch(f"The factorial is beyond {_MOST_GAMMA}!")
        self._pay(100 * self._digits / _DIGITS)
        return self._mp.gamma(numbers[0] + 1) if name == "factorial" else self._mp.binomial(*numbers)

    def _rounded(self, name: str, arguments: Sequence[Any]) -> Any:
        """Compute `abs`, `max`, `floor` and the like of inexact numbers. Raises Undefined near a jump."""
        if name == "abs":
            return abs(arguments[0])
        if any(isinstance(one, self._mp.mpc) for one in arguments):
            raise Undefined("The number is not real.")
        if name in ("max", "min"):
            numbers = [self._inexact(one) for one in arguments]
            return max(numbers) if name == "max" else min(numbers)
        if name in ("floor", "ceiling"):
            nearest = self._mp.nint(arguments[0])
            if abs(arguments[0] - nearest) < self._mp.mpf(10) ** -(_DIGITS // 2):
                raise Undefined("The number is too near to a jump of the function.")
            return Fraction(int(getattr(self._mp, name.replace("ceiling", "ceil"))(arguments[0])))
        raise Undefined(f"The argument of {name} is not whole.")


_NAMES: Final = {
    **{"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "arcsec": "asec", "arccsc": "acsc"},
    **{"arsinh": "asinh", "arcosh": "acosh", "artanh": "atanh", "ln": "log"},
}


def _points(names: Sequence[str]) -> list[tuple[dict[str, Fraction], bool]]:
    """Return values for the variables (small, large, positive and negative), each with True if they are whole
    numbers.
    """
    found = []
    for number in range(_NUM_POINTS + _NUM_WHOLE_POINTS):
        rng = random.Random(f"{number} {' '.join(names)}")
        is_whole = number >= _NUM_POINTS
        point = {}
        for name in names:
            below = rng.randint(10_007, 99_991)
            size = Fraction(rng.randint(1, below), below) * rng.choice((1, 1, 5, 23))
            is_negative = number % 4 == 3 or (number % 4 == 2 and rng.random() < 0.5)
            point[name] = Fraction(rng.randint(0, 12)) if is_whole else -size if is_negative else size
        found.append((point, is_whole))
    return found


CONSTANTS: Final = frozenset([r"\pi", "e", "i"])


def variables(*expressions: Basic) -> list[str]:
    """Return the sorted names of all variables, without constants such as pi."""
    return sorted(_names(*expressions) - CONSTANTS)


def _names(*expressions: Basic) -> set[str]:
    names = {symbol.name for expression in expressions for symbol in expression.free_symbols}
    return {name for name in names if not name.startswith(COUNTER)}


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of both expressions at one point."""

    answer: Any
    expected: Any
    least: Any
    """Differences below this value are rounding errors; None if both values are exact."""

    @property
    def are_equal(self) -> bool:
        if isinstance(self.answer, Fraction) and isinstance(self.expected, Fraction):
            return self.answer == self.expected
        return bool(abs(_sized(self.answer, self.least) - _sized(self.expected, self.least)) < self.least)

    @property
    def quotient(self) -> Any:
        if isinstance(self.answer, Fraction) and isinstance(self.expected, Fraction):
            return self.answer / self.expected
        return _sized(self.answer, self.least) / _sized(self.expected, self.least)


def _sized(number: Any, like: Any) -> Any:
    return like.context.mpf(number.numerator) / number.denominator if isinstance(number, Fraction) else number


def _values(answer: Basic, expected: Basic) -> Iterator[_Values | None]:
    """Yield the values of both expressions at each point where the expected expression has a real value. Yield None if
    the answer has no value there.

    If the expressions contain `i`, or no variables, the expected value need not be real.
    """
    names = variables(answer, expected)
    is_complex = "i" in _names(answer, expected) or not names
    num_found = 0
    for point, is_whole in _points(names) if names else [({}, False)]:
        if is_whole and num_found >= _NEEDED:
            return
        first = Arithmetic()
        try:
            wanted = first.value(expected, point)
        except Undefined:
            wanted = None
        if wanted is None or not (is_complex or first.is_real):
            continue
        try:
            found = first.value(answer, point)
            if not (isinstance(found, Fraction) and isinstance(wanted, Fraction)):
                found, wanted, first = _recomputed(answer, expected, point, first)
        except Undefined:
            found = None
        if found is not None and (is_complex or first.is_real):
            num_found += 1
            yield _Values(found, wanted, first.least)
        elif not is_whole:
            yield None


def _recomputed(
    answer: Basic, expected: Basic, point: Mapping[str, Fraction], first: Arithmetic
) -> tuple[Any, Any, Arithmetic]:
    arithmetic = first.refined()
    return arithmetic.value(answer, point), arithmetic.value(expected, point), arithmetic


def is_same_value(answer: Basic, expected: Basic) -> bool:
    """Return True if both expressions have the same value at all points where `expected` has a real value. Raises
    TooMuch."""
    num_same = 0
    for values in _values(answer, expected):
        if values is None or not values.are_equal:
            return False
        num_same += 1
    return num_same >= (_NEEDED if variables(answer, expected) else 1)


def constant_ratio(answer: Basic, expected: Basic) -> Fraction | None:
    """Return answer / expected if the quotient is the same rational number at all points. Return None otherwise. Raises
    TooMuch."""
    found: list[_Values] = []
    for values in _values(answer, expected):
        if values is None:
            return None
        if not values.expected or not values.answer:
            if not values.are_equal:
                return None
            continue
        found.append(values)
    if len(found) < _NEEDED or not all(isinstance(values.quotient, Fraction) for values in found):
        return None
    quotients = {values.quotient for values in found}
    return quotients.pop() if len(quotients) == 1 else None


def is_rational(constant: Basic) -> bool:
    """Return True if an expression without variables is a rational number, or is too large for a decision."""
    try:
        return isinstance(Arithmetic().value(constant, {}), Fraction)
    except Undefined:
        return False
    except TooMuch:
        return True


def approximation(constant: Basic) -> Fraction | None:
    """Return the real value of an expression without variables. It is exact if it is rational, else it has 50 decimals.

    Return None if there is no real value. Raises TooMuch if 50 decimals may not be enough to distinguish the value from
    0."""
    arithmetic = Arithmetic(4 * _DECIMALS, largest=_DECIMALS / 2)
    try:
        value = arithmetic.value(constant, {})
    except Undefined:
        return None
    if isinstance(value, Fraction):
        return value
    return Fraction(arithmetic.rounded(value, _DECIMALS), 10**_DECIMALS) if arithmetic.is_real else None
