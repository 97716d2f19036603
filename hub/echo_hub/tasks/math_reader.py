r"""Parse a whole answer: an expression, a list, a set, a tuple, an interval, a matrix or an equation.

    x \le -2 \text{ or } x \ge 3      Sets("or", (Relation, Relation))
    (-\infty, 2] \cup \{5\}           Sets("or", (RealInterval, Several))
    x = 2, y = \frac{1}{2}            Several("list", (Relation, Relation))
    2516_8                            Exact("base", ...)

Expressions become sympy trees that keep the written form: nothing is computed here. Any unknown part of the text raises
`NotUnderstood`, because the meaning could change if a part were skipped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

from echo_hub.tasks.math_expressions import read_expression
from echo_hub.tasks.math_tokens import CLOSING, OPENING, Call, Group, Node, NotUnderstood, Token, TokenKind, key, nodes
from echo_hub.tasks.quantities import plain

if TYPE_CHECKING:
    from sympy import Basic

ORDER: Final = {"<": ">", r"\le": r"\ge", ">": "<", r"\ge": r"\le"}
"""Maps a sign to the sign that means the same after the two sides are swapped."""
_RELATIONS: Final = frozenset(["=", r"\ne", r"\in", *ORDER])
_SET_SIGNS: Final = {r"\cup": "or", r"\cap": "and", r"\setminus": "without"}
_REALS: Final = frozenset(["all real numbers", "all reals", "all real values", "the real numbers", "real numbers"])
_MATRICES: Final = frozenset(["matrix", "pmatrix", "bmatrix", "Bmatrix", "array"])
_TIME: Final = re.compile(
    r"(?P<hour>\d{1,2})(?::(?P<minute>\d\d))?(?::(?P<second>\d\d))?\s*(?P<half>[AaPp])\.?\s*[Mm]\.?"
)
_DIVISION: Final = re.compile(
    r"(?:(?P<of>\d{1,18})\s*(?:\\div|/)\s*(?P<by>\d{1,18})\s*=\s*)?"
    r"(?P<whole>\d{1,18})\s*(?:R|r|rem|remainder)\.?\s*(?P<rest>\d{1,18})"
)
_THOUSANDS: Final = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_ROW_END: Final = "\\\\"


@dataclass(frozen=True, slots=True)
class Several:
    """Several items of one answer. `kind` is list (joined by commas or words), set (in braces), tuple, ratio, or row
    (in brackets)."""

    kind: str
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class RealInterval:
    """An interval. If an end is None, it is infinite."""

    low: Basic | None
    high: Basic | None
    has_low: bool
    has_high: bool


@dataclass(frozen=True, slots=True)
class Sets:
    """Several sets or inequalities, joined by `or`, `and`, or `without`."""

    by: str
    parts: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """Two or more sides with the signs between them."""

    sides: tuple[Item, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """A matrix, as a tuple of rows."""

    rows: tuple[tuple[Basic, ...], ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """An expression with a unit or a currency."""

    expression: Basic
    unit: str


@dataclass(frozen=True, slots=True)
class Exact:
    r"""An answer without arithmetic: a number with its base, a time, a set of numbers such as `\mathbb{Z}`."""

    kind: str
    said: tuple[object, ...]


Item: TypeAlias = "Basic | Several | RealInterval | Sets | Relation | Grid | Measured | Exact"


def read(text: str) -> Item:
    """Parse all of a text. Raises NotUnderstood."""
    said = plain(text)
    if said.casefold() in _REALS:
        return RealInterval(None, None, has_low=False, has_high=False)
    if (time := _TIME.fullmatch(said)) is not None:
        return Exact(
            "time", (int(time["hour"]), int(time["minute"] or 0), int(time["second"] or 0), time["half"].lower())
        )
    if (division := _DIVISION.fullmatch(said)) is not None:
        return _division(division)
    pieces = nodes(_with_thousands(text))
    while pieces and isinstance(pieces[-1], Token) and pieces[-1].text in (".", ","):
        pieces = pieces[:-1]
    if not pieces:
        raise NotUnderstood("nothing")
    apart, between = _split_where(pieces, [_joint(piece) != "" for piece in pieces])
    parts, joints = _without_double_joints(apart, [_joint(joint) for joint in between])
    if not joints:
        return _item(pieces)
    items = [_item(part) for part in parts]
    if all(map(_is_condition, items)) and set(joints) in ({"or"}, {"and"}):
        return Sets(joints[0], tuple(items))
    if all(isinstance(item, RealInterval) or _is_condition(item) for item in items) and {*joints} == {"or"}:
        return Sets("or", tuple(items))
    if any(isinstance(item, RealInterval) for item in items):
        raise NotUnderstood("No sign joins the intervals.")
    return Several("list", tuple(inner for item in items for inner in _listed(item)))


def _division(found: re.Match[str]) -> Exact:
    """Parse a quotient with remainder, such as `3 R 1` or `7/2 = 3 R 1`."""
    whole, rest = int(found["whole"]), int(found["rest"])
    if found["of"] and int(found["of"]) != int(found["by"]) * whole + rest:
        raise NotUnderstood("The division is not correct.")
    return Exact("division", (whole, rest))


def _with_thousands(text: str) -> str:
    """Remove the commas of thousands in `12,345\\pi`. If the text has brackets, it stays unchanged, because `(12,345)`
    is a pair."""
    return (
        text
        if any(bracket in text for bracket in "([{")
        else _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    )


def _joint(piece: Node) -> str:
    match piece:
        case Token(kind=TokenKind.WORD, text=("or" | "and") as word):
            return word
        case Token(text="," | ";"):
            return ","
    return ""


def _without_double_joints(
    parts: Sequence[Sequence[Node]], joints: Sequence[str]
) -> tuple[list[Sequence[Node]], list[str]]:
    """Merge each comma that is directly followed by `and` or `or` with that word, so that both together separate two
    items."""
    kept_parts: list[Sequence[Node]] = [parts[0]]
    kept_joints: list[str] = []
    for part, joint in zip(parts[1:], joints, strict=True):
        if not kept_parts[-1] and kept_joints and kept_joints[-1] == "," and joint != ",":
            kept_joints[-1] = joint
            kept_parts[-1] = part
        else:
            kept_joints.append(joint)
            kept_parts.append(part)
    return kept_parts, kept_joints


def _listed(item: Item) -> tuple[Item, ...]:
    """Return the items of a list, such as both values of `\\pm 2`. Return any other item alone, as a tuple of one."""
    return item.items if isinstance(item, Several) and item.kind == "list" else (item,)


def _is_condition(item: Item) -> bool:
    """Return True for an inequality or a membership (x in a set), False for an equation."""
    return isinstance(item, Relation) and all(sign != "=" for sign in item.signs)


def _is_sign(piece: Node, *signs: str) -> bool:
    return isinstance(piece, Token) and piece.text in signs


def _split(pieces: Sequence[Node], *signs: str) -> tuple[list[Sequence[Node]], list[Node]]:
    return _split_where(pieces, [_is_sign(piece, *signs) for piece in pieces])


def _split_where(pieces: Sequence[Node], are_joints: Sequence[bool]) -> tuple[list[Sequence[Node]], list[Node]]:
    """Split the pieces at every piece for which `are_joints` is True, outside all brackets. Return the parts, and the
    pieces that separate them."""
    parts: list[Sequence[Node]] = []
    joints: list[Node] = []
    depth = begin = 0
    for place, (piece, is_joint) in enumerate(zip(pieces, are_joints, strict=True)):
        depth += _deeper(piece)
        if depth == 0 and is_joint:
            parts.append(pieces[begin:place])
            joints.append(piece)
            begin = place + 1
    return [*parts, pieces[begin:]], joints


def _deeper(piece: Node) -> int:
    match piece:
        case Token(text=text):
            return (text in OPENING) - (text in CLOSING)
        case Call(name=name):
            return (name == r"\begin") - (name == r"\end")
    return 0


def _item(pieces: Sequence[Node]) -> Item:
    if not pieces:
        raise NotUnderstood("An item of the answer is empty.")
    num_both = sum(_count(piece, r"\pm") for piece in pieces)
    if num_both or any(_count(piece, r"\mp") for piece in pieces):
        if num_both != 1:
            raise NotUnderstood(r"The answer has several \pm.")
        return Several("list", tuple(_item([_with_sign(piece, sign) for piece in pieces]) for sign in "+-"))
    sides, signs = _split(pieces, *_RELATIONS)
    if not signs:
        return _value(pieces)
    texts = tuple(sign.text for sign in signs if isinstance(sign, Token))
    return Relation(tuple(_value(side) for side in sides), texts)


def _count(piece: Node, text: str) -> int:
    match piece:
        case Token(text=found):
            return int(found == text)
        case Call(arguments=arguments):
            return sum(_count(inner, text) for argument in arguments for inner in argument)
    return sum(_count(inner, text) for inner in piece.inner)


def _with_sign(piece: Node, sign: str) -> Node:
    match piece:
        case Token(text=r"\pm"):
            return Token(TokenKind.SIGN, sign)
        case Token(text=r"\mp"):
            return Token(TokenKind.SIGN, "-" if sign == "+" else "+")
        case Call(arguments=arguments):
            signed = tuple(tuple(_with_sign(inner, sign) for inner in argument) for argument in arguments)
            return replace(piece, arguments=signed)
        case Token():
            return piece
    return replace(piece, inner=tuple(_with_sign(inner, sign) for inner in piece.inner))


def _value(pieces: Sequence[Node]) -> Item:
    """Parse an item that is not a relation: an expression, a set, a list in brackets or a matrix."""
    parts, joints = _split(pieces, *_SET_SIGNS)
    if joints:
        by = {_SET_SIGNS[joint.text] for joint in joints if isinstance(joint, Token)}
        if len(by) > 1 or (by == {"without"} and len(joints) > 1):
            raise NotUnderstood("Several set signs have no brackets.")
        return Sets(by.pop(), tuple(_braced(part) or _value(part) for part in parts))
    parts, joints = _split(pieces, ":")
    if joints:
        return Several("ratio", tuple(read_expression(part) for part in parts))
    match pieces:
        case [Group(inner=inner)] if not inner or _split(inner, ",")[1]:
            return _set(inner, _split(inner, ",")[0])
        case [Token(text=r"\emptyset")]:
            return Several("set", ())
        case [Call(name=r"\mathbb", arguments=((Token(text="R"),),))]:
            return RealInterval(None, None, has_low=False, has_high=False)
        case [Call(name=r"\mathbb", arguments=((Token(text="N" | "Z" | "Q" | "C" as letter),),))]:
            return Exact("numbers", (letter,))
        case [Call(name=r"\begin"), *_]:
            return _environment(pieces)
        case [Token(text="(" | "["), Call(name=r"\begin"), *_, Call(name=r"\end"), Token(text=")" | "]")]:
            return _environment(pieces[1:-1])
        case [*number, Call(name="_", arguments=(base,))] if number:
            if (found := _in_base(number, base)) is not None:
                return found
        case [Token(text=first), *_, Token(text=last)] if first in OPENING and last in CLOSING:
            if _closes_last(pieces):
                return _bracketed(first, pieces[1:-1], last)
    if (sign := _infinity(pieces)) is not None:
        return Exact("infinity", (sign,))
    return _measured(pieces)


def _braced(pieces: Sequence[Node]) -> Item | None:
    """Parse a set whose braces have no backslashes. LaTeX would not show such braces, but answers contain them."""
    match pieces:
        case [Group(inner=inner)]:
            return _set(inner, _split(inner, ",")[0])
    return None


def _closes_last(pieces: Sequence[Node]) -> bool:
    depth = 0
    for place, piece in enumerate(pieces):
        depth += _deeper(piece)
        if depth == 0:
            return place == len(pieces) - 1
    return False


def _infinity(pieces: Sequence[Node]) -> str | None:
    match pieces:
        case [Token(text=r"\infty")] | [Token(text="+"), Token(text=r"\infty")]:
            return "+"
        case [Token(text="-"), Token(text=r"\infty")]:
            return "-"
    return None


def _bracketed(first: str, inner: Sequence[Node], last: str) -> Item:
    parts, joints = _split(inner, ",", ";")
    match first, last:
        case (r"\{", r"\}"):
            return _set(inner, parts)
        case (r"\langle", r"\rangle") if joints:
            return Several("tuple", tuple(map(read_expression, parts)))
        case ("(" | "[", ")" | "]") if len(parts) == 2 and (first + last != "()" or any(map(_infinity, parts))):
            ends = [None if _infinity(part) else read_expression(part) for part in parts]
            if "-" in (_infinity(parts[1]),) or "+" in (_infinity(parts[0]),):
                raise NotUnderstood("An interval has the wrong infinity at one end.")
            has_low, has_high = first == "[", last == "]"
            if (has_low and ends[0] is None) or (has_high and ends[1] is None):
                raise NotUnderstood("An interval includes an infinity.")
            return RealInterval(ends[0], ends[1], has_low=has_low, has_high=has_high)
        case ("(", ")") if joints:
            return Several("tuple", tuple(_value(part) for part in parts))
        case ("[", "]") if joints:
            return Several("row", tuple(map(read_expression, parts)))
        case ("(", ")") if not joints and _split(inner, *_SET_SIGNS)[1]:
            return _value(inner)
    return _measured([Token(TokenKind.SIGN, first), *inner, Token(TokenKind.SIGN, last)])


def _set(inner: Sequence[Node], parts: Sequence[Sequence[Node]]) -> Item:
    if not inner:
        return Several("set", ())
    (left, *right), bars = _split(inner, "|", ":")
    if len(bars) == 1:
        condition = _item(right[0])
        names = left[: next((place for place, piece in enumerate(left) if _is_sign(piece, r"\in")), len(left))]
        if not _is_condition(condition) or key(left) not in (key(names), (*key(names), r"\in", (r"\mathbb", ("R",)))):
            raise NotUnderstood("The condition that defines the set cannot be parsed.")
        if not any(side == read_expression(names) for side in getattr(condition, "sides", ())):
            raise NotUnderstood("The condition is not on the set's variable.")
        return condition
    return Several("set", tuple(each for part in parts for each in _listed(_item(part))))


def _in_base(number: Sequence[Node], base: Sequence[Node]) -> Exact | None:
    """Return a number with its base, such as 2516_8. Return None for a letter with an index."""
    match number:
        case [Token(text="("), *inner, Token(text=")")]:
            number = inner
    text = "".join(piece.text if isinstance(piece, Token) else "?" for piece in number)
    below = "".join(piece.text if isinstance(piece, Token) else "?" for piece in base)
    if not re.fullmatch(r"-?(?=.*\d)[\dA-F.]+", text):
        return None
    return Exact("base", (text, {"two": "2", "eight": "8", "ten": "10", "sixteen": "16"}.get(below, below)))


def _environment(pieces: Sequence[Node]) -> Item:
    match pieces:
        case [Call(arguments=(name,)), *inner, Call(name=r"\end", arguments=(ended,))] if name == ended:
            kind = "".join(piece.text for piece in name if isinstance(piece, Token))
        case _:
            raise NotUnderstood("A LaTeX environment has no end.")
    if kind == "array" and inner and isinstance(inner[0], Group):
        inner = inner[1:]  # Skip the argument that aligns the matrix's columns.
    if inner and _is_sign(inner[-1], _ROW_END):
        inner = inner[:-1]
    rows, _ = _split(inner, _ROW_END)
    cells = [_split(row, "&")[0] for row in rows]
    if kind == "cases" and all(len(row) == 1 for row in cells):
        without_commas = [row[0][:-1] if row[0] and _joint(row[0][-1]) == "," else row[0] for row in cells]
        return Several("list", tuple(_item(row) for row in without_commas))
    if kind not in _MATRICES or len({len(row) for row in cells}) != 1:
        raise NotUnderstood(f"The LaTeX environment {kind} is not supported.")
    return Grid(tuple(tuple(map(read_expression, row)) for row in cells))


def _measured(pieces: Sequence[Node]) -> Item:
    """Parse an expression and the unit after it."""
    pieces, before = list(pieces), ""
    match pieces:
        case [Token(text="$" | "€" | "£" | "¥") as money, *rest]:
            pieces, before = rest, money.text
    end = len(pieces)
    while end and _is_of_unit(pieces, end - 1):
        end -= 1
    unit = "".join(_unit_text(piece) for piece in pieces[end:]).strip()
    if end == 0 or _is_sign(pieces[end - 1], "+", "-", "*", "/", r"\cdot", r"\times") or not unit:
        end, unit = len(pieces), ""
    expression = read_expression(pieces[:end])
    if before and unit:
        raise NotUnderstood("The answer has both a currency and a unit.")
    return Measured(expression, before or unit) if before or unit else expression


def _is_of_unit(pieces: Sequence[Node], place: int) -> bool:
    before = pieces[place - 1] if place else None
    is_behind_word = isinstance(before, Token) and before.kind is TokenKind.WORD
    match pieces[place]:
        case Token(kind=TokenKind.WORD):
            return True
        case Token(text="%" | r"\%" | "$" | "€" | "£" | "¢"):
            return True
        case Token(text="/"):
            return is_behind_word
        case Call(name="^", arguments=((Token(kind=TokenKind.NUMBER),),)):
            return is_behind_word
    return False


def _unit_text(piece: Node) -> str:
    match piece:
        case Call(arguments=((Token(text=power),),)):
            return f"^{power}"
        case Token(kind=TokenKind.WORD, text=word):
            return f" {word}"
        case Token(text=text):
            return text
    raise NotUnderstood("The unit is unknown.")
