"""Check the form of an answer. For example, if a problem asks to factor a formula, a copy of the formula is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from echo_hub.tasks.math_values import is_rational, variables
from echo_hub.tasks.quantities import as_written

if TYPE_CHECKING:
    from sympy import Basic

_SPACED: Final = 10
"""An answer longer than this multiple of the question's length cannot be a copy of a part of the question."""
_COMPUTED: Final = frozenset(["factorial", "binomial", "gcd", "lcm", "floor", "ceiling", "max", "min", "abs"])
"""Functions that leave something to compute. A number in the form `NUMBER` may not contain them."""
_HIGHEST_DEGREE: Final = 40
_LARGEST: Final = 10**30
"""Largest number in an answer whose simplification is checked. An answer with a larger number counts as not
simplified."""
_ASKS_TO_FACTOR: Final = re.compile(r"factor|product", re.IGNORECASE)


class Form(StrEnum):
    """A form that a problem may require. A reference answer that is a number implies `number`; a product of sums
    implies `factored`."""

    NUMBER = "number"
    """The answer must be a written-out number: no operation is left to compute."""
    SIMPLIFIED = "simplified"
    """The answer must have reduced fractions, no square factor under a root, and like terms collected, and no operation
    may be left to compute."""
    FACTORED = "factored"
    """The answer must be a product with at least as many factors as the reference answer."""
    EXPANDED = "expanded"
    """The answer must be a sum without products of sums."""
    UNIT = "unit"
    """The answer must name the unit."""


def form_of(expected: Basic, question: str) -> Form | None:
    """Return the form that a reference answer implies. Return None if it implies none.

    A product of numbers implies `factored`. So does a product of sums with variables, if the question asks to factor or
    is unknown.
    """
    from sympy import Add

    if num_factors(expected) < 2:
        return None
    is_sum_among = any(isinstance(part, Add) for part, _ in _factors(expected))
    is_asked = not question or _ASKS_TO_FACTOR.search(question) is not None
    return Form.FACTORED if not variables(expected) or (is_sum_among and is_asked) else None


def has_form(answer: Basic, form: Form | None, *, expected: Basic) -> bool:
    """Return True if the answer, as it is written, has the form. The caller has already checked the answer's value."""
    if form is Form.FACTORED:
        return num_factors(answer) >= num_factors(expected)
    if form is Form.EXPANDED:
        return not any(_is_product_of_sums(part) for part in _parts(answer))
    if form is Form.SIMPLIFIED:
        return is_worked_out(answer) and num_terms(answer) <= num_terms(expected) and not _may_be_reduced(answer)
    return bool(variables(answer)) or is_worked_out(answer, may_have_powers=_has_power(expected))


def _has_power(expected: Basic) -> bool:
    return any(_is_power(part) for part in _parts(expected))


def _is_power(part: Basic) -> bool:
    """Return True for a computable power of plain numbers, and for a factorial or a similar function of plain numbers.

    Fractions' denominators do not count, although sympy stores them as powers.
    """
    from sympy import Integer, Pow

    if type(part).__name__ in ("sum", "product"):
        return True
    if type(part).__name__ in _COMPUTED:
        return all(map(_is_plain, part.args))
    if not isinstance(part, Pow) or not all(map(_is_plain, part.args)):
        return False
    exponent = part.args[1]
    return bool(exponent != -1) if isinstance(exponent, Integer) else is_rational(part)


def _is_plain(part: Basic) -> bool:
    from sympy import Number

    return all(isinstance(atom, Number) for atom in _parts(part) if not atom.args) and not part.atoms(_function())


def _function() -> type[Basic]:
    from sympy.core.function import AppliedUndef

    found: type[Basic] = AppliedUndef
    return found


def is_worked_out(answer: Basic, *, may_have_powers: bool = False) -> bool:
    """Return True if no sum, product or quotient of plain numbers is left to compute, except a fraction."""
    from sympy import Add, Mul, Number

    for part in _parts(answer):
        if isinstance(part, Add) and sum(isinstance(term, Number) for term in part.args) > 1:
            return False
        if isinstance(part, Mul) and sum(_is_left(term) for term in part.args) > 1:
            return False
        if not may_have_powers and _is_power(part):
            return False
    return True


def _is_left(factor: Basic) -> bool:
    from sympy import Number

    return (isinstance(factor, Number) and factor != -1) or _is_power(factor)


def is_sum_of_numbers(expression: Basic) -> bool:
    from sympy import Add, Number

    return isinstance(expression, Add) and all(isinstance(part, Number) for part in expression.args)


def num_factors(expression: Basic) -> int:
    """Return the number of factors with a variable, with multiplicity. For whole numbers, return the number of factors.

    A power of one number counts as one.
    """
    from sympy import Mul

    return (
        sum(times for _, times in _factors(expression)) if variables(expression) or isinstance(expression, Mul) else 1
    )


def _factors(expression: Basic, times: int = 1, *, of_numbers: bool | None = None) -> Iterator[tuple[Basic, int]]:
    from sympy import Integer, Mul, Number, Pow

    of_numbers = not variables(expression) if of_numbers is None else of_numbers
    if isinstance(expression, Mul):
        for part in expression.args:
            yield from _factors(part, times, of_numbers=of_numbers)
    elif isinstance(expression, Pow) and isinstance(expression.exp, Integer) and expression.exp > 0:
        yield from _factors(expression.base, times * int(expression.exp), of_numbers=of_numbers)
    elif isinstance(expression, Pow) and isinstance(expression.exp, Number) and expression.exp < 0:
        return  # This is the denominator of a quotient.
    elif variables(expression) or (of_numbers and isinstance(expression, Integer) and abs(expression) > 1):
        yield expression, times


def num_terms(expression: Basic) -> int:
    from sympy import Add

    return sum(map(num_terms, expression.args)) if isinstance(expression, Add) else 1


def _parts(expression: Basic) -> Iterator[Basic]:
    from sympy import preorder_traversal

    return iter(preorder_traversal(expression))


def _is_product_of_sums(part: Basic) -> bool:
    from sympy import Add, Integer, Mul, Pow

    if isinstance(part, Mul):
        return any(isinstance(factor, Add) for factor in part.args)
    return isinstance(part, Pow) and isinstance(part.base, Add) and isinstance(part.exp, Integer) and part.exp > 1


def _may_be_reduced(answer: Basic) -> bool:
    """Return True if a fraction or a root of whole numbers can be reduced, or is too large for a decision."""
    from sympy import Integer, Pow, Rational, cancel, denom, fraction

    if _degree(answer) > _HIGHEST_DEGREE or any(abs(number.p) > _LARGEST for number in answer.atoms(Rational)):
        return True
    for part in _parts(answer):
        if (
            isinstance(part, Pow)
            and isinstance(part.base, Integer)
            and part.exp == Rational(1, 2)
            and part.doit() != part
        ):
            return True
    below = denom(answer)
    if any(isinstance(part, Pow) and not part.exp.is_integer for part in _parts(below)):
        return True
    return bool(below != 1 and denom(cancel(answer)) != fraction(answer.doit())[1])


def _degree(expression: Basic) -> int:
    """Return an upper bound of the degree and of the number of factors of the expanded expression."""
    from sympy import Integer, Pow

    if not expression.args:
        return 1
    if isinstance(expression, Pow) and isinstance(expression.exp, Integer):
        return _degree(expression.base) * abs(int(expression.exp))
    return sum(map(_degree, expression.args))


def repeats(answer: str, question: str, expected: str) -> bool:
    """Return True if the answer is copied from the question and differs from the reference answer's text."""
    if len(answer) > _SPACED * len(question):
        return False
    said, asked = as_written(answer), as_written(question)
    return (
        len(said) > 2
        and said != as_written(expected)
        and re.search(rf"(?<![\d.]){re.escape(said)}(?![\d.]*\d)", asked) is not None
    )
