"""Whether two answers are equal as mathematics, and whether what was asked for has been done.

Both are read whole (`math_reader`) or not at all: what is not understood is right only where it is the reference
answer's own text, but for settings. Reading and comparing are bounded, so no answer takes longer than a second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from echo_hub.tasks.answers import tagged_answer
from echo_hub.tasks.math_equality import Comparison
from echo_hub.tasks.math_forms import Form, is_sum_of_numbers, repeats
from echo_hub.tasks.math_reader import Item, Measured, read
from echo_hub.tasks.math_tokens import LONGEST, NotUnderstood, key, nodes
from echo_hub.tasks.math_values import is_same_value, variables
from echo_hub.tasks.quantities import SAYS_MORE, Quantity, is_same_quantity, plain, read_quantity

_CACHED: Final = 4_096
_EQUALS: Final = re.compile(r"(?<![\\<>!=])=(?!=)")
_LONGEST_FORMULA: Final = 1_000
"""Characters of a tagged or boxed answer, where the reference answer is not nearly as long."""
_SPACED: Final = 4
_SHORTEST_CAPITALS: Final = 4
"""Letters of a word in capitals; shorter ones are names of segments and the like."""
_BOX: Final = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
_BEFORE_BOX: Final = frozenset("-+/^_0123456789")
_BEHIND_BOX: Final = re.compile(
    r"\s*\\(?:text|mathrm)\s*\{[^{}]{0,40}\}(?:\^\{?\d\}?)?|\\?%|\^?\s*\\circ|[-+/^_!(\d][^\s$.,;]{0,40}"
)
_MOST_BOXES: Final = 20
_ANSWER_IS: Final = re.compile(r"answer(?:\*\*)?\s*(?:is|:)(?:\*\*)?\s*([^\n]+)", re.IGNORECASE)
_SENTENCE_END: Final = re.compile(r"[.!?](?=\s|$)")
_FORMULA: Final = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<![\\\d$])\$(?!\s)([^$\n]+?)(?<!\\)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_BETWEEN: Final = re.compile(r"\s*(?:,|;|,?\s*and|,?\s*or)?\s*")
_NUMBER: Final = re.compile(r"(?:(?:\\?\$|[€£¥])\s?)?[-−+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?")
_UNIT_BEHIND: Final = re.compile(r"\s*(?:\\?%|[A-Za-zµΩ°]+(?:/[A-Za-z]+)?(?:\^\{?-?\d\}?|[²³])?)")
_BEFORE_NUMBER: Final = re.compile(r"(?:^|[=:(\s*])$")
_NO_OPERAND_BEFORE: Final = re.compile(r"[-+*/^×·÷√<>≤≥≈~_\\|&!]$|\d(?::|,|;|\s+and|\s+or|\s+to)?$")
_NO_OPERAND_BEHIND: Final = re.compile(r"[-+*/^×·÷√=<>≤≥_!\\|'°²³]|\w|\.\d|:\d|\(\S*[a-z]\^")
_PROSE: Final = re.compile(
    r"\s*(?:[A-Za-z][A-Za-z\s,'’]*?)?(?::|\b(?:is|are|was|be|equals|about|has|have|gets|total|so|thus|hence|therefore)\b):?\s*(?=\S)"
)
_CHINESE_PROSE: Final = re.compile(r"\s*(?:答案|结果)?(?:是|为|：|:)\s*")
_VARIABLES: Final = frozenset("bcdefghijklmnopqrstuvwxyzABCDEFGHJKLMNOPQRSTUVWXYZ")
"""All letters but those that are words."""
_CHOICE: Final = re.compile(r"\(?([A-Z])\)?")
_CHOSEN: Final = re.compile(r"(?:\(([A-Z])\)|([A-Z])[).:])(|\s+(?![-+*/^=<>]).*)", re.DOTALL)
_OTHER_CHOICE: Final = re.compile(r"\b[B-Z]\b|\(A\)")
_WORDS: Final = re.compile(r"[^\W\d_]+(?:[\s'’,.-]+[^\W\d_]+)*")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z\s']*")
_NATURAL: Final = re.compile(r"\\?\blog\b(?!\s*_)")


class Verdict(StrEnum):
    """On an answer."""

    RIGHT = "right"
    WRONG = "wrong"
    NOT_UNDERSTOOD = "not understood"
    """It, or the reference answer, is not read whole, and the texts differ. Earns nothing."""


def is_equal(completion: str, expected: str, *, question: str = "", form: Form | None = None) -> bool:
    """Whether the verdict is RIGHT."""
    return judge(completion, expected, question=question, form=form) is Verdict.RIGHT


def judge(completion: str, expected: str, *, question: str = "", form: Form | None = None) -> Verdict:
    r"""Whether the answer in `completion` is `expected`; this and a tagged answer may be LaTeX without dollar signs.

    The answer is looked for in the last `<answer>...</answer>`, else in what is in `\boxed{}` (several say the same, or
    make a list), else behind words such as "the answer is", else it is the last formula in dollar signs, else the last
    number.

    A number has to be written out, and exact; a product of sums has to be a product. `form`: what else is asked for. A
    formula of the `question` that is not the expected answer's own is never right. What is no mathematics is compared
    as words.
    """
    reference, comparison = _reference(expected), Comparison(form=form, question=question)
    answers = _answers(completion)
    if len(answers) > 1:
        verdicts = {_verdict(answer, reference, comparison) for answer in answers}
        if verdicts == {Verdict.RIGHT}:
            return Verdict.RIGHT
        answers = [", ".join(dict.fromkeys(answers))]
    if not answers:
        return Verdict.WRONG
    return _verdict(answers[0], reference, comparison)


class Understanding(StrEnum):
    """Of a reference answer."""

    NUMBER = "a number"
    FORMULA = "a formula"
    WORDS = "words"
    TEXT = "not understood"
    """Only the same text is right, but for settings."""


def understanding(expected: str) -> Understanding:
    """How a reference answer is read."""
    reference = _reference(expected)
    if reference.quantity is not None:
        return Understanding.NUMBER
    if reference.item is not None:
        return Understanding.FORMULA
    return Understanding.WORDS if reference.is_words else Understanding.TEXT


@dataclass(frozen=True, slots=True)
class _Reference:
    """What is expected."""

    text: str
    words: str
    is_words: bool
    """Their case does not count."""
    key: tuple[object, ...] | None
    quantity: Quantity | None
    item: Item | None
    """None: it is a number, no mathematics, or not understood."""


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
    """Whether it is a choice, `B` or `(B)`, or words: not `AB`, nor a variable."""
    is_name = len(text) == 1 or (text.isupper() and len(text) < _SHORTEST_CAPITALS)
    return _CHOICE.fullmatch(text) is not None or (_WORDS.fullmatch(text) is not None and not is_name)


def _key(text: str) -> tuple[object, ...] | None:
    try:
        return key(nodes(text))
    except NotUnderstood:
        return None


def _answers(completion: str) -> list[str]:
    """What is to be judged, of all of a completion; several: what several boxes hold."""
    said = tagged_answer(completion)
    boxes = _boxed(completion if said is None else said)
    if boxes:
        return boxes
    if said is not None:
        return [said]
    found = _called_answer(completion)
    return [] if found is None else [found]


def _boxed(text: str) -> list[str]:
    """What is in the last boxes that are in no other box, each once, with a sign, power or unit right next to it."""
    found: list[str] = []
    position = 0
    while (begin := _BOX.search(text, position)) is not None:
        depth, position = 1, begin.end()
        while depth and position < len(text):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            position += 1
        inner = text[begin.end() : position - (not depth)].strip()
        before = text[: begin.start()][-1:]
        behind = _BEHIND_BOX.match(text, position)
        found.append((before if before in _BEFORE_BOX else "") + inner + (behind[0] if behind else ""))
    return list(dict.fromkeys(found[-_MOST_BOXES:]))


def _called_answer(text: str) -> str | None:
    """What a text without tags and boxes calls its answer, its last formula, or its last number."""
    text = text[-LONGEST:]
    *_, last = ["", *_ANSWER_IS.findall(text)]
    if last:
        return _SENTENCE_END.split(last)[0] if _SENTENCE_END.search(last) else last
    formulas = list(_FORMULA.finditer(text))
    if formulas:
        said = [_inner(formulas[-1])]
        for before, behind in zip(formulas[-2::-1], formulas[:0:-1], strict=True):
            if not _BETWEEN.fullmatch(text, before.end(), behind.start()):
                break
            said.append(_inner(before))
        return ", ".join(reversed(said)) + _percent_behind(text, formulas[-1].end())
    return _last_number(text) or text


def _inner(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group)


def _percent_behind(text: str, position: int) -> str:
    unit = re.compile(r"\s*(?:\\?%|percent\b)").match(text, position)
    return unit[0] if unit else ""


def _last_number(text: str) -> str | None:
    """The last number with its unit, where nothing around it makes another number of it."""
    *_, last = [None, *_NUMBER.finditer(text)]
    if last is None:
        return None
    before, number = text[: last.start()], last[0].rstrip(",")
    words = before.split()[-1:]
    if not _BEFORE_NUMBER.search(before) or _NO_OPERAND_BEFORE.search(before.rstrip()) or SAYS_MORE & {*words}:
        return None
    end = last.start() + len(number)
    unit = _UNIT_BEHIND.match(text, end)
    if unit is not None:
        return number + unit[0] if read_quantity(number + unit[0]) is not None else None
    return None if _NO_OPERAND_BEHIND.match(text, end) or _NO_OPERATOR.match(text, end) else number


_NO_OPERATOR: Final = re.compile(r"\s+[-+*/^×·÷√=<>≤≥]\s*[\w(\\]")


def _verdict(said: str, reference: _Reference, comparison: Comparison) -> Verdict:
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
    """A number of which another form is asked for."""
    if reference.quantity is None:
        return None
    try:
        return read(reference.text)
    except NotUnderstood:
        return None


def _number_verdict(said: str, expected: Quantity, comparison: Comparison) -> Verdict:
    found = _only_quantity(said)
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
    if reference.is_words and _bare(words).casefold() == _bare(reference.words).casefold():
        return True
    if (choice := _CHOICE.fullmatch(reference.words)) is not None and (chosen := _CHOSEN.fullmatch(words)) is not None:
        is_alone = not _OTHER_CHOICE.search(chosen[3]) and not SAYS_MORE & {*chosen[3].lower().split()}
        return is_alone and choice[1] in (chosen[1], chosen[2])
    return words == reference.words or (bool(reference.key) and _key(said) == reference.key)


def _read(said: str, reference: _Reference) -> Item:
    """All of an answer, or all that stands behind words such as "the answer is"."""
    if r"\ln" in reference.text and "log" not in reference.text:
        said = _NATURAL.sub(r"\\ln ", said)
    try:
        return read(said)
    except NotUnderstood:
        rest = _without_prose(said)
        if rest is None:
            raise
        return read(rest)


def _without_prose(said: str) -> str | None:
    """What stands behind words that lead to an answer; None: there are none, or they say more than that."""
    if (chinese := _CHINESE_PROSE.match(said)) is not None:
        return said[chinese.end() :]
    prose = _PROSE.match(said)
    if prose is None or any(word.lower() in SAYS_MORE or word in _VARIABLES for word in prose[0].split()):
        return None
    return said[prose.end() :]


def _only_quantity(said: str) -> Quantity | None:
    """The number that is all of an answer, alone, at the end of a chain of equations, or behind words."""
    said = plain(said)
    sides = _EQUALS.split(said)
    for place in (-1, 0):
        found = read_quantity(sides[place])
        if found is not None and all(_may_equal(side, found) for side in sides if side is not sides[place]):
            return found
    rest = _without_prose(said)
    return None if rest is None else _only_quantity(rest)


def _may_equal(side: str, number: Quantity) -> bool:
    """Whether the other side of an equation is a name, in letters or words, or an expression that has the value."""
    from sympy import Basic, Rational

    side = side.strip()
    if not side or _NAME.fullmatch(side):
        return not SAYS_MORE & {*side.lower().split()}
    try:
        item = read(side)
        item = item.expression if isinstance(item, Measured) else item
        expected = Rational(number.value.numerator, number.value.denominator)
        return isinstance(item, Basic) and (bool(variables(item)) or is_same_value(item, expected))
    except NotUnderstood:
        return False


def _as_words(text: str) -> str:
    return " ".join(plain(text).split()) or text.strip()


def _bare(words: str) -> str:
    """Without brackets around all of it."""
    return words[1:-1] if words.startswith("(") and words.endswith(")") else words
