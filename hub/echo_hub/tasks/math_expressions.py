r"""Parse expressions: `2x + \frac{1}{2}\sin^2 x` becomes a sympy tree in which nothing is computed.

If a text has two possible readings, such as `1/2x` or `\sin x/2`, it counts as not understood.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from echo_hub.tasks.math_settings import GREEK
from echo_hub.tasks.math_tokens import COUNTER, FUNCTIONS, Call, Group, Node, NotUnderstood, Token, TokenKind, key

if TYPE_CHECKING:
    from sympy import Basic

_GREEK: Final = frozenset("\\" + name for name in [*GREEK.values(), "ell", "hbar"])
_MARKS: Final = frozenset([r"\vec", r"\hat", r"\tilde", r"\dot", r"\ddot", r"\overline", r"\mathbf"])
_FACES: Final = frozenset([r"\mathcal", r"\mathfrak", r"\mathscr"])
_NAMES: Final = frozenset("\\" + name for name in FUNCTIONS)
_OF_SEVERAL: Final = frozenset([r"\max", r"\min", r"\gcd", r"\lcm"])
_OF_FUNCTIONS: Final = frozenset("fghFGHPQ")
_TIMES: Final = frozenset(["*", r"\cdot", r"\times"])
_OVER: Final = frozenset(["/", r"\div"])
_ROUNDED: Final = {r"\lfloor": (r"\rfloor", "floor"), r"\lceil": (r"\rceil", "ceiling")}
_REPEATED: Final = {r"\sum": "sum", r"\prod": "product"}
_GROUPING: Final = {"(": ")", "[": "]"}
_MOST_DIGITS: Final = 2_000


def read_expression(pieces: Sequence[Node], counters: frozenset[str] = frozenset()) -> Basic:
    """Parse all pieces as one expression. Raises NotUnderstood. `counters` are the counting variables of the enclosing
    sums and products."""
    reader = _Reader(pieces, counters)
    found = reader.sum()
    if reader.piece is not None:
        raise NotUnderstood(f"The text from {_shown(reader.piece)} on cannot be parsed.")
    return found


def _shown(piece: Node) -> str:
    return piece.text if isinstance(piece, Token) else piece.name if isinstance(piece, Call) else "{"


@lru_cache(256)
def _named(name: str) -> Any:
    from sympy import Function

    return Function(name)


def _times(*factors: Basic) -> Basic:
    from sympy import Mul

    return Mul(*factors, evaluate=False) if len(factors) > 1 else factors[0]


def _inverse(of: Basic) -> Basic:
    from sympy import Pow

    return Pow(of, -1, evaluate=False)


def _negative(of: Basic) -> Basic:
    from sympy import Integer, Rational

    return -of if isinstance(of, Rational) else _times(Integer(-1), of)


def _as_fraction(exponent: Basic) -> Basic:
    """Turn a quotient of two whole numbers into a single Rational. Anything else is returned unchanged."""
    from sympy import Integer, Mul, Pow, Rational

    if isinstance(exponent, Mul) and len(exponent.args) == 2:
        above, below = exponent.args
        if (
            isinstance(above, Integer)
            and isinstance(below, Pow)
            and below.exp == -1
            and isinstance(below.base, Integer)
        ):
            return Rational(above, below.base) if below.base else exponent
    return exponent


def _is_sign(pieces: Sequence[Node], sign: str) -> bool:
    return bool(pieces) and isinstance(pieces[0], Token) and pieces[0].text == sign


class _Reader:
    """A recursive-descent parser. It reads every piece once."""

    def __init__(self, pieces: Sequence[Node], counters: frozenset[str]) -> None:
        self._pieces = pieces
        self._counters = counters
        self._place = 0
        self._in_bars = 0
        self._is_bare = False
        """True directly after a function whose argument is written without brackets, as in sin x."""

    @property
    def piece(self) -> Node | None:
        """Return the next piece to parse. Return None at the end."""
        return self._pieces[self._place] if self._place < len(self._pieces) else None

    def _is_at(self, *texts: str) -> bool:
        return isinstance(self.piece, Token) and self.piece.text in texts

    def _take(self, *texts: str) -> str | None:
        """Consume the next piece and return its text, if the piece is one of these signs. Return None otherwise."""
        if not self._is_at(*texts):
            return None
        piece = self.piece
        assert isinstance(piece, Token)
        self._place += 1
        return piece.text

    def _read(self, pieces: Sequence[Node]) -> Basic:
        return read_expression(pieces, self._counters)

    def sum(self) -> Basic:
        from sympy import Add

        sign = self._take("+", "-")
        terms = [_negative(self._product()) if sign == "-" else self._product()]
        while sign := self._take("+", "-"):
            terms.append(_negative(self._product()) if sign == "-" else self._product())
        return Add(*terms, evaluate=False) if len(terms) > 1 else terms[0]

    def _product(self) -> Basic:
        factors = [self._factor()]
        while True:
            is_bare, self._is_bare = self._is_bare, False
            if self._take(*_TIMES):
                factors.append(self._factor())
            elif self._take(*_OVER):
                factors.append(_inverse(self._factor()))
                if self._begins_factor():
                    raise NotUnderstood("A quotient is followed by a product without brackets.")
            elif self._begins_factor():
                is_function = self._is_at(*_NAMES)
                if is_bare and not is_function:
                    raise NotUnderstood("A function is followed by a product without brackets.")
                if isinstance(self.piece, Token) and self.piece.kind is TokenKind.NUMBER:
                    raise NotUnderstood("A number follows a factor.")
                factors.append(self._factor())
                continue
            else:
                return _times(*factors)
            if is_bare:
                raise NotUnderstood("A function is followed by a product without brackets.")

    def _begins_factor(self) -> bool:
        match self.piece:
            case Token(kind=TokenKind.NUMBER | TokenKind.LETTER):
                return True
            case Token(kind=TokenKind.WORD, text=word):
                return len(word) == 1 and word.isascii()
            case Token(text=text):
                is_bracket = text in _GROUPING or text in _ROUNDED or (text == "|" and not self._in_bars)
                return is_bracket or text in _NAMES or text in _GREEK or text in _REPEATED
            case Call(name=name):
                return name not in ("^", "_")
            case Group():
                return True
        return False

    def _factor(self) -> Basic:
        """Parse a base with its power, factorial, or degree sign."""
        from sympy import Pow, Rational, Symbol

        base = self._base()
        match self.piece:
            case Call(name="^", arguments=(exponent,)):
                if self._is_bare:
                    raise NotUnderstood("A power of a function is ambiguous.")
                self._place += 1
                base = Pow(base, _as_fraction(self._read(exponent)), evaluate=False)
                if isinstance(self.piece, Call) and self.piece.name == "^":
                    raise NotUnderstood("A power of a power has no brackets.")
        if not self._is_bare and self._take("!"):
            if self._is_at("!"):
                raise NotUnderstood("Double factorials are not supported.")
            base = _named("factorial")(base)
        if not self._is_bare and self._take("°"):
            base = _times(base, Symbol(r"\pi"), Rational(1, 180))
        return base

    def _base(self) -> Basic:
        piece = self.piece
        self._place += 1
        match piece:
            case Token(kind=TokenKind.NUMBER, text=text):
                return self._number(text)
            case Token(kind=TokenKind.LETTER, text=letter):
                return self._letter(letter)
            case Token(kind=TokenKind.WORD, text=letter) if len(letter) == 1 and letter.isascii():
                return self._letter(letter)
            case Token(text=name) if name in _GREEK:
                return self._letter(name)
            case Token(text=name) if name in _NAMES:
                return self._function(name)
            case Token(text=name) if name in _REPEATED:
                return self._repeated(_REPEATED[name])
            case Token(text=bracket) if bracket in _GROUPING:
                return self._inner(_GROUPING[bracket])
            case Token(text=bracket) if bracket in _ROUNDED:
                close, function = _ROUNDED[bracket]
                return _named(function)(self._inner(close))
            case Token(text="|"):
                return self._absolute()
            case Call(name=name, arguments=arguments):
                return self._called(name, arguments)
            case Group(inner=inner):
                if isinstance(self.piece, Call) and self.piece.name in ("^", "_") and len(inner) > 1:
                    raise NotUnderstood("A power of a text in braces is ambiguous.")
                return self._read(inner)
        self._place -= 1
        raise NotUnderstood("The expression ends early." if piece is None else f"{_shown(piece)} is not expected.")

    def _inner(self, close: str) -> Basic:
        in_bars, self._in_bars = self._in_bars, 0
        found = self.sum()
        self._in_bars = in_bars
        if self._take(close) is None:
            raise NotUnderstood(f"A {close} is missing.")
        self._is_bare = False
        return found

    def _absolute(self) -> Basic:
        if self._in_bars:
            raise NotUnderstood("Bars are nested in bars.")
        self._in_bars += 1
        found = self.sum()
        self._in_bars -= 1
        if self._take("|") is None:
            raise NotUnderstood("A | is missing.")
        self._is_bare = False
        return _named("abs")(found)

    def _number(self, text: str) -> Basic:
        from sympy import Rational

        whole, _, rest = text.partition(".")
        if len(text) > _MOST_DIGITS or (len(whole) > 1 and whole[0] == "0"):
            raise NotUnderstood(f"The number {text[:20]} cannot be parsed.")
        value = Fraction(f"{whole or '0'}.{rest or '0'}")
        match self.piece:
            case Call(name=r"\overline", arguments=((Token(kind=TokenKind.NUMBER, text=again),),)) if "." in text or (
                again.isdigit() and self._is_at(".")
            ):
                self._place += 1
                value += Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(rest))
            case Call(
                name=r"\frac",
                arguments=((Token(kind=TokenKind.NUMBER, text=above),), (Token(kind=TokenKind.NUMBER, text=below),)),
            ) if text.isdigit() and above.isdigit() and below.isdigit():
                if not 0 < int(above) < int(below):
                    raise NotUnderstood("A number before a fraction of numbers is ambiguous.")
                self._place += 1
                value += Fraction(int(above), int(below))
            case Token(text="e" | "E", is_apart=False) if self._is_exponent():
                raise NotUnderstood("The letter e is ambiguous: power of ten, or multiple of e.")
        if isinstance(self.piece, Call) and self.piece.name == "_":
            raise NotUnderstood("A number has an index.")
        return Rational(value.numerator, value.denominator)

    def _is_exponent(self) -> bool:
        """Return True if the letter e at this place may start a power of ten, as in 2e-3."""
        match self._pieces[self._place + 1 : self._place + 3]:
            case [Token(text="+" | "-", is_apart=False), Token(kind=TokenKind.NUMBER, is_apart=False)]:
                return True
        return False

    def _letter(self, name: str) -> Basic:
        """Parse a constant, or a variable with its index and primes. For a function such as f(x), the argument becomes
        part of the name.
        """
        from sympy import Symbol

        bare = name
        while True:
            match self.piece:
                case Call(name="_", arguments=(index,)):
                    name += f"_{key(index)}"
                case Token(text="'"):
                    name += "'"
                case Call(name="^", arguments=(primes,)) if primes and all(
                    isinstance(one, Token) and one.text == "'" for one in primes
                ):
                    name += "'" * len(primes)
                case Call(name="^", arguments=((Token(text="-"), Token(text="1")),)) if (
                    bare in _OF_FUNCTIONS and _is_sign(self._pieces[self._place + 1 : self._place + 2], "(")
                ):
                    name += "^{-1}"
                case _:
                    break
            self._place += 1
        if (bare in _OF_FUNCTIONS or name.endswith("'")) and self._is_at("(") and not self._is_apart:
            begin = self._place
            depth = 0
            while self.piece is not None:
                depth += self._is_at("(") - self._is_at(")")
                self._place += 1
                if depth == 0:
                    break
            if depth:
                raise NotUnderstood("A ) is missing.")
            name += str(key(self._pieces[begin : self._place]))
        return Symbol(f"{COUNTER}{name}" if name in self._counters else name)

    def _repeated(self, function: str) -> Basic:
        """Parse a sum or a product with bounds: `\\sum_{k=1}^{n} k^2`. A `+` or `-` after the term is refused: it would
        make the term's end ambiguous."""
        from sympy import Symbol

        bounds: dict[str, Sequence[Node]] = {}
        while isinstance(self.piece, Call) and self.piece.name in ("^", "_") and self.piece.name not in bounds:
            bounds[self.piece.name] = self.piece.arguments[0]
            self._place += 1
        match bounds.get("_"), bounds.get("^"):
            case [Token(kind=TokenKind.LETTER, text=counter), Token(text="="), *first], [*last] if last:
                low, high = self._read(first), self._read(last)
            case _:
                raise NotUnderstood(f"A {function} has no bounds.")
        outer, self._counters = self._counters, self._counters | {counter}
        term = self._product()
        self._counters = outer
        if self._is_at("+", "-"):
            raise NotUnderstood(f"A {function} is followed by a term without brackets.")
        self._is_bare = True
        return _named(function)(term, Symbol(f"{COUNTER}{counter}"), low, high)

    @property
    def _is_apart(self) -> bool:
        return self.piece is not None and self.piece.is_apart

    def _called(self, name: str, arguments: Sequence[Sequence[Node]]) -> Basic:
        from sympy import Integer, Pow, Rational

        if name == r"\frac":
            if all(isinstance(one, Token) and one.text in ("d", r"\partial") for one, *_ in filter(None, arguments)):
                raise NotUnderstood("Derivatives are not supported.")
            above, below = map(self._read, arguments)
            return _times(above, _inverse(below))
        if name == r"\sqrt":
            *index, inner = arguments
            root = self._read(index[0]) if index else Integer(2)
            exponent = Rational(1, int(root)) if isinstance(root, Integer) and root > 0 else _inverse(root)
            return Pow(self._read(inner), exponent, evaluate=False)
        if name == r"\binom":
            return _named("binomial")(*map(self._read, arguments))
        if name in _MARKS or name in _FACES:
            (inner,) = arguments
            letters = [
                piece
                for piece in inner
                if isinstance(piece, Token) and (piece.kind is TokenKind.LETTER or piece.text in _GREEK)
            ]
            if len(letters) == len(inner) and inner:
                mark = r"\vec" if name == r"\mathbf" else name
                return self._letter(f"{mark}({''.join(piece.text for piece in letters)})")
        raise NotUnderstood(name)

    def _function(self, name: str) -> Basic:
        """Parse a function, with a power before its argument: `\\sin^2 x`. `\\sin^{-1} x` is the inverse function."""
        from sympy import Integer, Pow

        power: Basic | None = None
        base: Basic | None = None
        while isinstance(self.piece, Call) and self.piece.name in ("^", "_"):
            found = self._read(self.piece.arguments[0])
            if self.piece.name == "^":
                power = found
            elif name == r"\log":
                base = found
            else:
                raise NotUnderstood(f"{name} has an index.")
            self._place += 1
        arguments = self._arguments() if name in _OF_SEVERAL else [self._argument(name)]
        function = name[1:]
        if power == Integer(-1):
            if function not in ("sin", "cos", "tan", "cot", "sec", "csc"):
                raise NotUnderstood(f"The inverse of {name} is not supported.")
            function, power = "arc" + function, None
        if base is not None:
            arguments.append(base)
        found = _named(function)(*arguments)
        return found if power is None else Pow(found, power, evaluate=False)

    def _arguments(self) -> list[Basic]:
        if self._take("(") is None:
            raise NotUnderstood("A function of several numbers has no brackets.")
        found = [self.sum()]
        while self._take(","):
            found.append(self.sum())
        if self._take(")") is None:
            raise NotUnderstood("A ) is missing.")
        self._is_bare = False
        return found

    def _argument(self, name: str) -> Basic:
        """Parse an argument in brackets. If there are no brackets, parse all simple factors that follow."""
        if self._is_at("(", "[", "|") or isinstance(self.piece, Group):
            found = self._base()
            if (isinstance(self.piece, Call) and self.piece.name == "^") or self._is_at("!", "°"):
                raise NotUnderstood(f"A power after {name} and its brackets is ambiguous.")
            self._is_bare = False
            return found
        factors: list[Basic] = []
        while self._begins_factor() and not self._is_at(*_NAMES, *_GROUPING, "|"):
            if factors and isinstance(self.piece, Token) and self.piece.kind is TokenKind.NUMBER:
                raise NotUnderstood("A number follows a factor.")
            factors.append(self._factor())
        if not factors:
            raise NotUnderstood(f"{name} has no argument.")
        self._is_bare = True
        return _times(*factors)
