r"""Split an answer into tokens and commands with their arguments: `\frac12` and `\frac{1}{2}` become the same pieces.

Unknown commands stay unchanged. So texts with different formatting have equal `key`s, even if they cannot be parsed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from echo_hub.tasks.math_settings import without_settings

LONGEST: Final = 4_000
"""Largest length of an answer that is parsed, in characters."""
DEEPEST: Final = 30
"""Largest depth of nested brackets and braces."""


class NotUnderstood(Exception):
    """The answer cannot be parsed as a whole. The message gives the reason."""


class TokenKind(Enum):
    NUMBER = "number"
    LETTER = "letter"
    """One letter, or several capital letters, such as a segment AB."""
    WORD = "word"
    COMMAND = "command"
    SIGN = "sign"


@dataclass(frozen=True, slots=True)
class Token:
    """A token. `is_apart` is True if white space precedes it."""

    kind: TokenKind
    text: str
    is_apart: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A command with its arguments; `^` and `_` are commands with one argument."""

    name: str
    arguments: tuple[tuple[Node, ...], ...]
    is_apart: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces in braces that are not an argument of a command."""

    inner: tuple[Node, ...]
    is_apart: bool = False


Node = Token | Call | Group

COUNTER: Final = "counter "
"""Name prefix of the counting variable of a sum or a product."""
OPENING: Final = frozenset(["{", "(", "[", r"\{", r"\langle", r"\lfloor", r"\lceil"])
CLOSING: Final = frozenset(["}", ")", "]", r"\}", r"\rangle", r"\rfloor", r"\rceil"])
FUNCTIONS: Final = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "arccot",
        "arcsec",
        "arccsc",
        "sinh",
        "cosh",
        "tanh",
        "coth",
        "arsinh",
        "arcosh",
        "artanh",
        "ln",
        "log",
        "exp",
        "min",
        "max",
        "gcd",
        "lcm",
    ]
)
_CONSTANTS: Final = {"pi": r"\pi", "infinity": r"\infty", "inf": r"\infty", "sqrt": r"\sqrt", "theta": r"\theta"}
_SHORT_WORDS: Final = frozenset(
    [
        "or",
        "and",
        "if",
        "is",
        "are",
        "the",
        "an",
        "a",
        "no",
        "not",
        "to",
        "of",
        "in",
        "on",
        "at",
        "by",
        "as",
        "it",
        "so",
        "for",
        "per",
        "cm",
        "mm",
        "km",
        "kg",
        "mg",
        "ml",
        "ft",
        "yd",
        "mi",
        "lb",
        "oz",
        "mph",
        "kmh",
        "hr",
        "hrs",
        "sec",
        "min",
        "day",
        "deg",
        "rad",
        "pm",
        "am",
        "men",
        "all",
        "any",
        "yes",
        "few",
        "new",
        "one",
        "two",
        "six",
        "ten",
        "usd",
        "eur",
        "gbp",
        "sq",
        "cu",
        "cc",
        "Hz",
        "kHz",
        "Pa",
        "kPa",
        "mL",
        "dL",
        "kW",
        "MB",
        "GB",
        "mol",
        "cal",
    ]
)
_ARITY: Final = {
    **{r"\frac": 2, r"\binom": 2, r"\sqrt": 1, "^": 1, "_": 1, r"\overline": 1, r"\vec": 1, r"\hat": 1, r"\tilde": 1},
    **{
        r"\dot": 1,
        r"\ddot": 1,
        r"\mathbf": 1,
        r"\mathbb": 1,
        r"\mathcal": 1,
        r"\mathfrak": 1,
        r"\mathscr": 1,
        r"\pmod": 1,
    },
    **{r"\begin": 1, r"\end": 1, r"\overset": 2, r"\underset": 2, r"\stackrel": 2, r"\cancel": 1, r"\widehat": 1},
}
_LEXED: Final = re.compile(r"\s+|\\[A-Za-z]+\*?|\\.|\d+(?:\.\d+)?|\.\d+|[A-Za-z]+|\*\*|.", re.DOTALL)


def nodes(text: str) -> tuple[Node, ...]:
    """Split a text into its pieces and drop the dollar signs around formulas.

    Raises NotUnderstood if the text is too long, nested too deeply, or has unmatched braces."""
    if len(text) > LONGEST:
        raise NotUnderstood(f"The text has more than {LONGEST:,} characters.")
    tokens = _tokens(without_settings(text))
    depth = 0
    for token in tokens:
        depth = max(0, depth + (token.text in OPENING) - (token.text in CLOSING))
        if depth > DEEPEST:
            raise NotUnderstood(f"More than {DEEPEST} brackets are nested.")
    return _nest(tokens)


def key(pieces: Sequence[Node]) -> tuple[object, ...]:
    """Return a key by which texts are compared: texts that differ only in formatting have equal keys."""
    found: list[object] = []
    for piece in pieces:
        match piece:
            case Call(name=name, arguments=arguments):
                found.append((name, *map(key, arguments)))
            case Group(inner=inner):
                found += key(inner)
            case Token(kind=TokenKind.WORD | TokenKind.LETTER, text=word):
                found += word
            case Token(text=word):
                found.append(word)
    return tuple(found)


def _tokens(text: str) -> list[Token]:
    found: list[Token] = []
    is_apart, position = False, 0
    pieces = _LEXED.findall(text.replace(r"\$", "\ue000"))
    in_text: list[int] = []
    """Depth of braces inside each open `\\text{`."""
    depth = 0
    while position < len(pieces):
        piece = pieces[position]
        position += 1
        if piece.isspace() or piece == "$":
            is_apart = is_apart or piece != "$"
            continue
        if piece == r"\text":
            while position < len(pieces) and pieces[position].isspace():
                position += 1
            if position < len(pieces) and pieces[position] == "{":
                depth, position, is_apart = depth + 1, position + 1, True
                in_text.append(depth)
            continue
        depth += {"{": 1, "}": -1}.get(piece, 0)
        if piece == "}" and in_text and depth < in_text[-1]:
            in_text.pop()
            is_apart = True
            continue
        found += _read(
            piece, is_apart=is_apart or not found, is_text=bool(in_text), before=found[-1].text if found else ""
        )
        is_apart = False
    return found


def _read(piece: str, *, is_apart: bool, is_text: bool, before: str) -> list[Token]:
    if piece[0].isdigit() or (piece[0] == "." and len(piece) > 1):
        digits = piece if len(piece) == 2 and before in (r"\frac", r"\binom") else [piece]
        return [Token(TokenKind.NUMBER, digit, is_apart) for digit in digits]
    if piece[0] == "\\":
        return [Token(TokenKind.COMMAND, piece, is_apart)]
    if not piece.isalpha():
        return [Token(TokenKind.SIGN, {"\ue000": "$", "**": "^"}.get(piece, piece), is_apart)]
    if piece.lower() in FUNCTIONS and (piece.islower() or piece.istitle()):
        return [Token(TokenKind.COMMAND, "\\" + piece.lower(), is_apart)]
    if piece in _CONSTANTS:
        return [Token(TokenKind.COMMAND, _CONSTANTS[piece], is_apart)]
    if not piece.isascii():
        return [Token(TokenKind.WORD, piece, is_apart)]
    if len(piece) == 1:
        is_word = is_text and piece not in "ei"
        return [Token(TokenKind.WORD if is_word else TokenKind.LETTER, piece, is_apart)]
    if piece.isupper() and len(piece) <= 3:
        return [Token(TokenKind.LETTER, piece, is_apart)]
    if is_text or len(piece) > 3 or (is_apart and piece in _SHORT_WORDS) or piece in ("or", "and"):
        return [Token(TokenKind.WORD, piece, is_apart)]
    return [Token(TokenKind.LETTER, letter, is_apart and not place) for place, letter in enumerate(piece)]


def _nest(tokens: Sequence[Token]) -> tuple[Node, ...]:
    inner, position = _until(tokens, 0, "", 0)
    assert position == len(tokens), "nothing but the end ends it"
    return inner


def _until(tokens: Sequence[Token], position: int, close: str, depth: int) -> tuple[tuple[Node, ...], int]:
    """Return the pieces before the closing token `close`, and the position after it."""
    if depth > DEEPEST:
        raise NotUnderstood(f"More than {DEEPEST} brackets are nested.")
    found: list[Node] = []
    while position < len(tokens):
        if tokens[position].text == close:
            return tuple(found), position + 1
        node, position = _node(tokens, position, depth)
        found.append(node)
    if close:
        raise NotUnderstood(f"A {close} is missing.")
    return tuple(found), position


def _node(tokens: Sequence[Token], position: int, depth: int) -> tuple[Node, int]:
    token = tokens[position]
    position += 1
    if token.text == "}":
        raise NotUnderstood("There is one } too many.")
    if token.text == "{":
        inner, position = _until(tokens, position, "}", depth + 1)
        return Group(inner, token.is_apart), position
    if token.text not in _ARITY:
        return token, position
    arguments: list[tuple[Node, ...]] = []
    if token.text == r"\sqrt" and position < len(tokens) and tokens[position].text == "[":
        index, position = _until(tokens, position + 1, "]", depth + 1)
        arguments.append(index)
    for _ in range(_ARITY[token.text]):
        argument, position = _argument(token.text, tokens, position, depth)
        arguments.append(argument)
    return Call(token.text, tuple(arguments), token.is_apart), position


def _argument(name: str, tokens: Sequence[Token], position: int, depth: int) -> tuple[tuple[Node, ...], int]:
    """Return a command's next argument (braces, or one digit, letter or command), and the position after it.

    `x^10`, `10^-3` and `sqrt(2)` are read as people mean them, although LaTeX would read them differently.
    """
    if position >= len(tokens):
        raise NotUnderstood(f"{name} has no argument.")
    token = tokens[position]
    if token.text in ("(", "[") and name in ("^", "_", r"\sqrt"):
        close = {"(": ")", "[": "]"}[token.text]
        inner, position = _until(tokens, position + 1, close, depth + 1)
        return inner, position
    behind = tokens[position + 1].kind if position + 1 < len(tokens) else None
    if name == "^" and token.text in ("+", "-") and behind in (TokenKind.NUMBER, TokenKind.LETTER):
        return (token, tokens[position + 1]), position + 2
    if token.kind is TokenKind.NUMBER and len(token.text) > 1 and name not in ("^", "_"):
        raise NotUnderstood(f"{name} has no braces.")
    if token.kind is TokenKind.SIGN and token.text not in "{'*+-":
        raise NotUnderstood(f"{name} cannot precede {token.text}.")
    if depth >= DEEPEST:
        raise NotUnderstood(f"More than {DEEPEST} brackets are nested.")
    node, position = _node(tokens, position, depth + 1)
    return (node.inner if isinstance(node, Group) else (node,)), position
