"""Whether two answers are equal as mathematics, by math-verify, and whether what was asked for has been done.

Its own time limits are off: they use signals, and scorers have a limit of their own (`echo_hub.scoring.pool`).
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from echo_hub.tasks.answers import tagged_answer
from echo_hub.tasks.math_forms import Form, form_of, has_form, is_sum_of_numbers, repeats
from echo_hub.tasks.quantities import SAYS_MORE, Quantity, is_same_quantity, plain, read_quantity

if TYPE_CHECKING:
    from sympy import Basic

_CACHED: Final = 4_096
_EQUALS: Final = re.compile(r"(?<![\\<>!=])=(?!=)")
_LONGEST_FORMULA: Final = 1_000
"""Characters of a tagged or boxed answer, where the reference answer is not nearly as long: reading thousands of
brackets would take minutes."""
_SPACED: Final = 4
_BOXED: Final = r"\boxed{"
_LISTED: Final = re.compile(r",?\s(?:and|or)\s|;")
_ANSWER_IS: Final = re.compile(r"answer\s*(?:is|:)\s*([^.\n]+)", re.IGNORECASE)
_PROSE: Final = re.compile(r"[A-Za-z][A-Za-z\s:,']*")
_VARIABLES: Final = frozenset("bcdefghijklmnopqrstuvwxyzABCDEFGHJKLMNOPQRSTUVWXYZ")
"""All letters but those that are words."""
_UNIT_BEHIND: Final = re.compile(r"\s*(?:\\?%|[A-Za-zµΩ°]+(?:/[A-Za-z]+)?(?:\^\{?-?\d\}?|[²³])?)")


def is_equal(completion: str, expected: str, *, question: str = "", form: Form | None = None) -> bool:
    r"""Whether the answer in `completion` is `expected`; this and a tagged answer may be LaTeX without dollar signs.

    The answer is looked for in the last `<answer>...</answer>`, else in what is in `\boxed{}` (several make a set),
    else where math-verify does: what follows words such as "the final answer is", else the last formula, else the last
    number.

    A number has to be written out, and exact; a product of sums has to be a product. `form`: what else is asked for. A
    formula of the `question` that is not the expected answer's own is never right. What is no mathematics is compared
    as words.
    """
    reference = _reference(expected)
    tagged = tagged_answer(completion)
    said = tagged if tagged is not None else _boxed(completion)
    if reference.quantity is not None and form in (None, Form.NUMBER, Form.SIMPLIFIED, Form.UNIT):
        found = _last_quantity(completion) if said is None else _only_quantity(said)
        needs_unit = form is Form.UNIT
        if found is None or not is_same_quantity(found, reference.quantity, needs_unit=needs_unit):
            return False
        return not repeats(found.written, question, reference.quantity.written) and (
            form is not Form.SIMPLIFIED or found.is_reduced
        )
    if _as_words(_words_in(completion) if said is None else said) == reference.words:
        return True
    if said is not None and len(said) > max(_LONGEST_FORMULA, _SPACED * len(expected)):
        return False
    return any(
        _is_same(answer, reference, form, question) and not repeats(text, question, expected)
        for answer, text in _formulas(completion, said, reads_units=reference.reads_units)
    )


@dataclass(frozen=True, slots=True)
class _Reference:
    """What is expected."""

    words: str
    quantity: Quantity | None
    formulas: tuple[Basic, ...]
    """Its readings; none: it is no mathematics, as a date is none."""
    reads_units: bool = True
    """Not where a letter behind a number is a variable."""


@lru_cache(_CACHED)
def _reference(expected: str) -> _Reference:
    words, quantity = _as_words(expected), read_quantity(expected)
    if quantity is not None and not quantity.is_letter:
        return _Reference(words, quantity, ())
    reads_units = quantity is None
    formulas = tuple(formula for formula, _ in _parse(_as_formula(expected), reads_units=reads_units))
    return _Reference(words, None, () if any(map(is_sum_of_numbers, formulas)) else formulas, reads_units)


def _boxed(completion: str) -> str | None:
    r"""What is in all `\boxed{}`, once where they say the same; None where there is none."""
    found, position = [], 0
    while (begin := completion.find(_BOXED, position)) >= 0:
        begin += len(_BOXED)
        depth, position = 1, begin
        while depth and position < len(completion):
            depth += {"{": 1, "}": -1}.get(completion[position], 0)
            position += 1
        found.append(completion[begin : position - (not depth)].strip())
    return ", ".join(dict.fromkeys(found)) if found else None


def _only_quantity(said: str) -> Quantity | None:
    """The number that is all of an answer, alone, at the end of a chain of equations, or behind words."""
    sides = _EQUALS.split(plain(said))
    for side in (sides[-1], sides[0]) if len(sides) > 1 else sides:
        if (found := read_quantity(side)) is not None:
            return found
    prose = _PROSE.match(said)
    if prose is None or any(word.lower() in SAYS_MORE or word in _VARIABLES for word in prose[0].split()):
        return None
    return read_quantity(said[prose.end() :])


def _last_quantity(text: str) -> Quantity | None:
    """The number that math-verify takes, with the unit behind it."""
    for _, found in _parse(text):
        side = _EQUALS.split(found)[-1].strip()
        quantity = read_quantity(side)
        if quantity is None:
            return None
        begin = text.rfind(side)
        unit = _UNIT_BEHIND.match(text, begin + len(side)) if begin >= 0 else None
        with_unit = read_quantity(side + unit[0]) if unit else None
        return with_unit or quantity
    return None


def _formulas(completion: str, said: str | None, *, reads_units: bool) -> list[tuple[Basic, str]]:
    """The readings of an answer, with what each reads."""
    if said is None:
        return _parse(completion, reads_units=reads_units)
    listed = _as_formula(_LISTED.sub(", ", said))
    return _parse(listed, reads_units=reads_units) or _parse(said, reads_units=reads_units)


def _is_same(answer: Basic, reference: _Reference, form: Form | None, question: str) -> bool:
    from math_verify import verify

    return any(
        _is_ordered(answer) == _is_ordered(expected)
        and verify([_exact(expected)], [_exact(answer)], timeout_seconds=None, allow_set_relation_comp=True)
        and has_form(answer, form or form_of(expected, question), expected=expected)
        for expected in reference.formulas
    )


def _is_ordered(formula: Any) -> bool | None:
    """Whether it is a tuple; None where it is no list of several things."""
    from sympy import Equality, FiniteSet, Tuple

    things = formula.rhs if isinstance(formula, Equality) else formula
    return isinstance(things, Tuple) if isinstance(things, FiniteSet | Tuple) and len(things) > 1 else None


def _exact(formula: Any) -> Any:
    """With decimals as the fractions that they are: math-verify would round them."""
    from sympy import Basic, Float, Rational

    if not isinstance(formula, Basic) or not formula.has(Float):
        return formula
    return formula.xreplace({number: Rational(str(number)) for number in formula.atoms(Float)})


def _as_words(text: str) -> str:
    words = plain(text).casefold()
    inner = words[1:-1] if words.startswith("(") and words.endswith(")") else words
    return inner or text.strip()


def _words_in(completion: str) -> str:
    """What a text without tags calls its answer, else all of it."""
    *_, last = ["", *_ANSWER_IS.findall(completion)]
    return last or completion


def _as_formula(text: str) -> str:
    text = text.replace(r"\varnothing", r"\emptyset")
    return text if "$" in text or _BOXED in text else f"${text}$"


def _parse(text: str, *, reads_units: bool = True) -> list[tuple[Any, str]]:
    """What math-verify finds, with the text that it has read."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # It warns of the time limits that are off.
    reading = NormalizationConfig(
        basic_latex=True, units=reads_units, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    targets = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=reading), ExprExtractionConfig()]
    found: list[Any] = parse(text, extraction_config=targets, parsing_timeout=None)
    texts = [one for one in found if isinstance(one, str)]
    return [(one, texts[0] if texts else "") for one in found if not isinstance(one, str)]
