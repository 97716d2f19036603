"""Judge if two answers are equal as mathematics, and if the answer has the required form.

`math_reader` parses the answer and the reference answer, each completely or not at all. If the answer cannot be parsed,
it must equal the reference answer's text, apart from formatting. The work is bounded, so no answer takes longer than a
second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from echo_hub.tasks.math_equality import AnswerComparison
from echo_hub.tasks.math_extraction import answers_in, says_more, without_prose
from echo_hub.tasks.math_forms import Form, is_sum_of_numbers, repeats
from echo_hub.tasks.math_reader import Item, Measured, read
from echo_hub.tasks.math_tokens import LONGEST, NotUnderstood, key, nodes
from echo_hub.tasks.math_values import bounded_work, is_same_value, variables
from echo_hub.tasks.quantities import Quantity, as_written, is_same_quantity, plain, read_quantity

_CACHED: Final = 4_096
_EQUALS: Final = re.compile(r"(?<![\\<>!=])=(?!=)")
_LONGEST_FORMULA: Final = 1_000
"""Largest length of an answer in characters. A longer answer is allowed if it has at most four times the length of the
reference answer."""
_SPACED: Final = 4
_SHORTEST_CAPITALS: Final = 4
"""Smallest number of capital letters in a row that count as a word. Fewer letters are a name, such as AB for a
segment."""
_CHOICE: Final = re.compile(r"\(?([A-Z])\)?")
_CHOSEN: Final = re.compile(
    r"(?:\(([A-Z])\)|([A-Z])[).:]|(?:[Oo]ption|[Cc]hoice)\s+\(?([A-Z])[).:]?)(|\s+(?=[\w\\$(]).*)", re.DOTALL
)
_OTHER_CHOICE: Final = re.compile(r"\b[B-Z]\b|\(A\)")
_WORDS: Final = re.compile(r"[^\W\d_]+(?:[\s'’,.-]+[^\W\d_]+)*")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z\s']*")
_NATURAL: Final = re.compile(r"\\?\blog\b(?!\s*_)")


class Verdict(StrEnum):
    """The verdict on an answer, given the reference answer."""

    RIGHT = "right"
    WRONG = "wrong"
    NOT_UNDERSTOOD = "not understood"
    """The answer or the reference answer cannot be parsed completely, and their texts differ. Such an answer earns
    nothing."""


def is_equal(completion: str, expected: str, *, question: str = "", form: Form | None = None) -> bool:
    return judge(completion, expected, question=question, form=form) is Verdict.RIGHT


def judge(completion: str, expected: str, *, question: str = "", form: Form | None = None) -> Verdict:
    r"""Judge the answer in `completion`. A tagged answer and `expected` may be LaTeX without dollar signs.

    The answer is the content of the last `<answer>...</answer>`. Without one, it is the content of `\boxed{}` (several
    boxes agree or form a list), the text after words such as "the answer is", the last formula in dollar signs, or
    the last number, in this order.

    A number must be exact and computed to the end, and a factored expression must be written as a product. `form` is
    the form that the problem requires. A formula copied from the `question` is wrong, unless it equals the expected
    answer's text. Answers that are not mathematics are compared as words.
    """
    reference, comparison = _reference(expected), AnswerComparison(form=form, question=question)
    answers = answers_in(completion)
    with bounded_work():
        if len(answers) > 1:
            if all(_verdict(answer, reference, comparison) is Verdict.RIGHT for answer in answers):
                return Verdict.RIGHT
            answers = [", ".join(answers)]
        return _verdict(answers[0], reference, comparison) if answers else Verdict.WRONG


class Understanding(StrEnum):
    """How a reference answer is read, which determines how answers are compared with it."""

    NUMBER = "a number"
    FORMULA = "a formula"
    WORDS = "words"
    TEXT = "not understood"
    """The reference answer cannot be parsed. Right answers have the same text, apart from formatting such as fonts and
    spaces."""


def understanding(expected: str) -> Understanding:
    reference = _reference(expected)
    if reference.quantity is not None:
        return Understanding.NUMBER
    if reference.is_words and (reference.item is None or _bare(reference.words)[:1].isupper()):
        return Understanding.WORDS
    return Understanding.TEXT if reference.item is None else Understanding.FORMULA


@dataclass(frozen=True, slots=True)
class _Reference:
    """A reference answer with its parsed forms. A form is None if parsing failed."""

    text: str
    words: str
    is_words: bool
    """True for words and for choices such as (B). Their comparison ignores upper and lower case."""
    key: tuple[object, ...] | None
    quantity: Quantity | None
    item: Item | None
    """The parsed answer. None for numbers, words, and text that cannot be parsed."""


@lru_cache(_CACHED)
def _reference(expected: str) -> _Reference:
    if len(expected) > LONGEST:
        return _Reference(expected, expected, is_words=False, key=None, quantity=None, item=None)
    words, quantity = plain(expected), read_quantity(expected)
    if quantity is not None and quantity.is_letter:
        quantity = None
    item = None
    if quantity is None:
        try:
            item = read(expected)
        except NotUnderstood:
            item = None
        if item is not None and is_sum_of_numbers(item):
            item = None
    return _Reference(expected, _as_words(expected), _is_words(words), _key(expected), quantity, item)


def _is_words(text: str) -> bool:
    """Return True for a choice (`B`, `(B)`) and for words, but not for a name such as `AB` or a variable."""
    is_name = len(text) == 1 or (text.isupper() and len(text) < _SHORTEST_CAPITALS)
    return _CHOICE.fullmatch(text) is not None or (_WORDS.fullmatch(text) is not None and not is_name)


def _key(text: str) -> tuple[object, ...] | None:
    try:
        return key(nodes(text))
    except NotUnderstood:
        return None


def _verdict(said: str, reference: _Reference, comparison: AnswerComparison) -> Verdict:
    if said.strip() == reference.text.strip() and reference.quantity is None:
        return Verdict.RIGHT
    if len(said) > min(LONGEST, max(_LONGEST_FORMULA, _SPACED * len(reference.text))):
        return Verdict.NOT_UNDERSTOOD
    if reference.quantity is not None and comparison.form in (None, Form.NUMBER, Form.SIMPLIFIED, Form.UNIT):
        return _number_verdict(said, reference.quantity, comparison)
    if _is_same_text(said, reference):
        return Verdict.RIGHT
    item = reference.item or _number_as_formula(reference)
    if item is None:
        return Verdict.WRONG if reference.is_words else Verdict.NOT_UNDERSTOOD
    if repeats(said, comparison.question, reference.text):
        return Verdict.WRONG
    try:
        return Verdict.RIGHT if comparison.is_same(_read(said, reference), item) else Verdict.WRONG
    except NotUnderstood:
        return Verdict.NOT_UNDERSTOOD


def _number_as_formula(reference: _Reference) -> Item | None:
    """Parse a numeric reference answer as a formula, if the problem requires a form such as `factored`."""
    if reference.quantity is None:
        return None
    try:
        return read(reference.text)
    except NotUnderstood:
        return None


def _number_verdict(said: str, expected: Quantity, comparison: AnswerComparison) -> Verdict:
    found = _only_quantity(said, comparison.question)
    if found is None:
        try:
            read(said)
        except NotUnderstood:
            return Verdict.NOT_UNDERSTOOD
        return Verdict.WRONG
    is_right = (
        is_same_quantity(found, expected, needs_unit=comparison.form is Form.UNIT)
        and not repeats(found.written, comparison.question, expected.written)
        and (comparison.form is not Form.SIMPLIFIED or found.is_reduced)
    )
    return Verdict.RIGHT if is_right else Verdict.WRONG


def _is_same_text(said: str, reference: _Reference) -> bool:
    words = _as_words(said)
    if reference.is_words:
        led = without_prose(words) or words
        if _bare(reference.words).casefold() in (_bare(words).casefold(), _bare(led).casefold()):
            return True
    if (choice := _CHOICE.fullmatch(reference.words)) is not None and (chosen := _CHOSEN.fullmatch(words)) is not None:
        is_alone = not _OTHER_CHOICE.search(chosen[4]) and not says_more(chosen[4])
        return is_alone and choice[1] in chosen.groups()[:3]
    return words == reference.words or (bool(reference.key) and _key(said) == reference.key)


def _read(said: str, reference: _Reference) -> Item:
    if r"\ln" in reference.text and "log" not in reference.text:
        said = _NATURAL.sub(r"\\ln ", said)
    try:
        return read(said)
    except NotUnderstood:
        rest = without_prose(said)
        if rest is None:
            raise
        return read(rest)


def _only_quantity(said: str, question: str) -> Quantity | None:
    """Return the single number that an answer such as `x = 2 + 3 = 5` or `the answer is 5` gives. Return None if the
    answer does not end with one number."""
    said = plain(said)
    for text in (said, without_prose(said)):
        sides = _EQUALS.split(text or "")
        for place in (-1, 0):
            found = read_quantity(sides[place])
            others = [side for side in sides if side is not sides[place]]
            if found is not None and all(_may_equal(side, found, question) for side in others):
                return found
    return None


def _may_equal(side: str, number: Quantity, question: str) -> bool:
    """Return True if this side of an equation does not contradict the number: it is a name, an expression copied from
    the question, or an equal value."""
    from sympy import Basic, Rational, Symbol

    side = side.strip()
    if not side or _NAME.fullmatch(side):
        return not says_more(side)
    try:
        item = read(side)
        item = item.expression if isinstance(item, Measured) else item
        if not isinstance(item, Basic):
            return False
        if variables(item):
            return isinstance(item, Symbol) or as_written(side) in as_written(question)
        return is_same_value(item, Rational(number.value.numerator, number.value.denominator))
    except NotUnderstood:
        return False


def _as_words(text: str) -> str:
    return " ".join(plain(text).split()) or text.strip()


def _bare(words: str) -> str:
    return words[1:-1] if words.startswith("(") and words.endswith(")") else words
