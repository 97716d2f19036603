r"""Find the answer in a completion: the tagged text, boxes, the text after "the answer is", or the last number.

A sign or unit directly next to a box belongs to the box's content: `-\boxed{5}` is -5. A tagged answer is used as a
whole, but if only words and punctuation surround a box in it, the box is used.
"""

from __future__ import annotations

import re
from typing import Final

from echo_hub.tasks.answers import tagged_answer
from echo_hub.tasks.math_tokens import LONGEST
from echo_hub.tasks.quantities import SAYS_MORE, read_quantity

_BOX: Final = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
_MOST_BOXES: Final = 20
_OPERATION: Final = (
    r"\\(?:cdot|times|div|pm|mp|sqrt|d?frac|sin|cos|tan|ln|log|exp|neq?|not|leq?|geq?|lt|gt|approx|sim|pi|infty|in|cup|cap"
    r"|[lc]?dots|over|circ|pmod|binom|neg|lnot|forall|exists|sum|prod|int)(?![A-Za-z])"
)
_BEFORE_BOX: Final = re.compile(rf"(?:{_OPERATION}\s*|[/^_√≠≈<>≤≥±×÷·~\d]\s*|(?<=\S)\s*[-+]\s*|^[-+]|[-+.]|[A-Za-z])$")
_IN_LIST: Final = re.compile(r"(?:^|\n)\s*[-+*]\s+$")
_BEHIND_BOX: Final = re.compile(
    rf"\s*\\(?:text|mathrm)\s*\{{[^{{}}]{{0,40}}\}}(?:\^\{{?\d\}}?)?|\s*{_OPERATION}[^$\n]{{0,40}}|\\?%"
    r"|\s*[-+*/^_<>≤≥×÷·][^$\n*]{1,40}|[!(\d√A-Za-z°][^\s$.,;]{0,40}"
)
_AROUND_BOXES: Final = re.compile(r"(?:\\[()\[\],;:! ]|\\q?quad|[A-Za-z\s.,:;!=$'\"()*~&-])*")
_ANSWER_IS: Final = re.compile(r"answer(?:\*\*)?\s*(?:is|:)(?:\*\*)?\s*([^\n]+)", re.IGNORECASE)
_SENTENCE_END: Final = re.compile(r"[.!?](?=\s|$)")
_FORMULA: Final = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<![\\\d$])\$(?!\s)([^$\n]+?)(?<!\\)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_BETWEEN: Final = re.compile(r"\s*(?:,|;|,?\s*and|,?\s*or)?\s*")
_PERCENT: Final = re.compile(r"\s*(?:\\?%|percent\b)")
_NUMBER: Final = re.compile(r"(?:(?:\\?\$|[€£¥])\s?)?[-−+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?")
_UNIT_BEHIND: Final = re.compile(r"\s*(?:\\?%|[A-Za-zµΩ°]+(?:/[A-Za-z]+)?(?:\^\{?-?\d\}?|[²³])?)")
_BEFORE_NUMBER: Final = re.compile(r"(?:^|[=:\s*]|(?<![\w)])\()$")
_OPERAND_BEFORE: Final = re.compile(r"[-+*/^×·÷√<>≤≥≈~_\\|&!]$|\d(?::|,|;|\s+and|\s+or|\s+to)?$")
_OPERATOR_BEFORE: Final = re.compile(r"\S\s*[-+/^×·÷√<>≤≥≠≈]\s*$")
_OPERAND_BEHIND: Final = re.compile(r"[-+*/^×·÷√=<>≤≥_!\\|'°²³]|\w|\.\d|:\d|\(\S*[a-z]\^|\s+[-+*/^×·÷√=<>≤≥]\s*[\w(\\]")
_PROSE: Final = re.compile(
    r"\s*(?:[A-Za-z][A-Za-z\s,'’]*?)?"
    r"(?:\s*(?::|\b(?:is|are|was|be|equals|about|has|have|gets|earns|costs|makes|needs|total|so|thus|hence|therefore"
    r"|equal to)\b))+"
    r"\s*(?=\S)"
)
_CHINESE_PROSE: Final = re.compile(r"\s*(?:答案|结果)?(?:是|为|：|:)\s*")
_VARIABLES: Final = frozenset("bcdefghijklmnopqrstuvwxyzBCDEFGHJKLMNOPQRSTUVWXYZ")
"""Letters that are variables: all letters except A, I and a, which are words."""
_EQUAL_TO: Final = re.compile(
    r"\b(?:equal|equivalent|simplifies|reduces|evaluates|comes|amounts|leads|adds up|sums)\s+to\b", re.IGNORECASE
)
_COMPUTES: Final = re.compile(
    r"\b(?:negative|half|twice|double|triple|thrice|reciprocal|inverse|opposite|quarter|third|root|squared|cubed"
    r"|square of|cube of|sqrt|log|ln|sin|cos|tan|times|isn|aren|wasn|never|cannot)\b",
    re.IGNORECASE,
)


def answers_in(completion: str) -> list[str]:
    """Return the answers in a completion: one text, one text for each box, or an empty list."""
    said = tagged_answer(completion)
    boxes, around = _boxed(completion if said is None else said)
    if said is not None:
        is_prose = bool(_AROUND_BOXES.fullmatch(around)) and not says_more(around)
        return boxes if boxes and is_prose else [said]
    if boxes:
        return boxes
    found = _called_answer(completion)
    return [] if found is None else [found]


def says_more(words: str) -> bool:
    """Return True if these words change the meaning of the number after them, like "not", "half of" or "at least"."""
    words = _EQUAL_TO.sub(" ", words)
    return bool(SAYS_MORE & {*re.findall(r"[a-z]+", words.lower())}) or _COMPUTES.search(words) is not None


def without_prose(said: str) -> str | None:
    """Return the text after words such as "the answer is". Return None if such words are missing or change the answer's
    meaning."""
    if (chinese := _CHINESE_PROSE.match(said)) is not None:
        return said[chinese.end() :]
    prose = _PROSE.match(said)
    if prose is None or says_more(prose[0]) or _VARIABLES & {*prose[0].split()}:
        return None
    return said[prose.end() :]


def _boxed(text: str) -> tuple[list[str], str]:
    """Return the contents of the last boxes, without repetition, and the text around all boxes.

    A sign, power or unit directly next to a box belongs to the box's content. Boxes inside boxes are not listed.
    """
    found: list[str] = []
    around: list[str] = []
    position = 0
    while (begin := _BOX.search(text, position)) is not None:
        outside = text[position : begin.start()]
        depth, position = 1, begin.end()
        while depth and position < len(text):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            position += 1
        inner = text[begin.end() : position - (not depth)].strip()
        before = None if _IN_LIST.search(outside[-40:]) else _BEFORE_BOX.search(outside[-40:])
        behind = _BEHIND_BOX.match(text, position)
        position = behind.end() if behind else position
        around.append(outside[: len(outside) - len(before[0])] if before else outside)
        found.append((before[0] if before else "") + inner + (behind[0] if behind else ""))
    return list(dict.fromkeys(found[-_MOST_BOXES:])), " ".join([*around, text[position:]])


def _called_answer(text: str) -> str | None:
    """Return the answer of a text without tags and boxes. This is the text after "answer is", the last formula, or the
    last number."""
    text = text[-LONGEST:]
    *_, last = ["", *_ANSWER_IS.findall(text)]
    if last:
        return _SENTENCE_END.split(last)[0] if _SENTENCE_END.search(last) else last
    formulas = list(_FORMULA.finditer(text))
    if formulas:
        said = [_inner(formulas[-1])]
        first = formulas[-1]
        for before, behind in zip(formulas[-2::-1], formulas[:0:-1], strict=True):
            if not _BETWEEN.fullmatch(text, before.end(), behind.start()):
                break
            said.append(_inner(before))
            first = before
        if _leads_on(text[: first.start()]):
            return text
        percent = _PERCENT.match(text, formulas[-1].end())
        return ", ".join(reversed(said)) + (percent[0] if percent else "")
    return _last_number(text) or text


def _inner(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group)


def _leads_on(before: str) -> bool:
    """Return True if the words directly before a formula or a number change its meaning."""
    *_, line = ["", *before.splitlines()]
    return _OPERATOR_BEFORE.search(line) is not None or says_more(" ".join(line.split()[-3:]))


def _last_number(text: str) -> str | None:
    """Return the last number with its unit. Return None if the text around the number changes its value."""
    *_, last = [None, *_NUMBER.finditer(text)]
    if last is None:
        return None
    before, number = text[: last.start()], last[0].rstrip(",")
    if not _BEFORE_NUMBER.search(before) or _OPERAND_BEFORE.search(before.rstrip()) or _leads_on(before):
        return None
    end = last.start() + len(number)
    unit = _UNIT_BEHIND.match(text, end)
    if unit is not None:
        return number + unit[0] if read_quantity(number + unit[0]) is not None else None
    return None if _OPERAND_BEHIND.match(text, end) else number
