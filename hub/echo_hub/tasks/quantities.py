r"""Parse written-out numbers with units: `1\,234`, `-\frac{3}{4}`, `1 1/2`, `2e-3`, `5\%`, `\$3`, `5 cm`.

Written out means that no operation is left to compute: `17*23` and `\sqrt{4}` are not accepted. Values are exact.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, Final

from echo_hub.tasks.math_settings import without_settings

if TYPE_CHECKING:
    from pint import UnitRegistry

_LONGEST: Final = 200
"""Largest length, in characters, of a text that is read as a number with a unit."""
_KEPT: Final = 1_024

_INTEGER: Final = r"(?:\d{1,3}(?:(?:,|\\,|\{,\}|\ )\d{3})+(?!\d)|\d+)"
_DECIMAL: Final = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)"
_TO_THE: Final = r"10\s*(?:\^|\*\*)\s*(?:\{\s*%s\s*\}|%s)"
_POWER: Final = r"[+-]?\d{1,3}"
_TIMES: Final = r"(?:\\times|\\cdot|\*|·|x)"
_NUMBER: Final = rf"""
    (?P<whole>{_INTEGER})(?:\s|\\\s|\\,)*\\frac\{{(?P<of_whole>{_INTEGER})\}}\{{(?P<by_whole>{_INTEGER})\}}
  | (?P<and>{_INTEGER})\s+(?:and\s+)?(?P<of_and>\d+)\s*/\s*(?P<by_and>\d+)
  | \\frac\{{\s*(?P<of>[+-]?\s*{_INTEGER})\s*\}}\{{\s*(?P<by>[+-]?\s*{_INTEGER})\s*\}}
  | (?P<over>{_INTEGER})\s*/\s*(?P<under>[+-]?{_INTEGER})
  | {_TO_THE % (f"(?P<braced>{_POWER})", f"(?P<bare>{_POWER})")}
  | (?P<decimal>{_DECIMAL})(?:\\overline\s*\{{(?P<repeated>\d+)\}})?
    (?:[eE](?P<exponent>{_POWER})
      |\s*{_TIMES}\s*{_TO_THE % (f"(?P<times_braced>{_POWER})", f"(?P<times_bare>{_POWER})")})?
"""
_QUANTITY: Final = re.compile(
    rf"(?P<sign>[+-])?\s*(?P<money>\\?\$|[€£¥])?\s*(?P<inner>[+-])?\s*(?P<number>{_NUMBER})(?P<gap>(?:\s|\\\s|\\,|~)*)(?P<unit>.*)",
    re.VERBOSE | re.DOTALL,
)
_WORD: Final = (
    r"[A-Za-zµμΩ°%€£¥¢$个只人本张条件天次名位块岁元年月日时分秒米克升]+(?:\s*(?:\^|\*\*)\s*(?:\{\s*-?\d\s*\}|-?\d))?"
)
_UNIT: Final = re.compile(rf"{_WORD}(?:\s*(?:/|\*|·|\\cdot|\s|-)\s*{_WORD})*")
SAYS_MORE: Final = frozenset(
    {"or", "and", "not", "no", "to", "than", "least", "most", "if", "but", "either", "plus", "minus", "over", "under"}
)
"""Words that change the meaning of a neighbouring number, such as "at least" or "3 or 4"."""
_LETTERS: Final = frozenset("mgshlLNJWVAKCFΩ°%€£¥¢$个只人本张条件天次名位块岁元年月日时分秒米克升")
"""Single letters that are units after a number. Other letters are variables."""
_SAYS_NOTHING: Final = frozenset({"unit", "units"})
_SCALES: Final = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Maps a number word to its power of ten: "million" to 6."""
_UNREADABLE: Final = (ArithmeticError, ValueError, TypeError, AttributeError, SyntaxError, LookupError, TokenError)
"""Exceptions that the library pint raises for texts without a unit, in addition to pint's own exception classes."""
_NAMES: Final = {
    **{"$": "us_dollar", "dollar": "us_dollar", "dollars": "us_dollar", "usd": "us_dollar"},
    **{"cents": "us_cent", "cent": "us_cent", "€": "euro", "euros": "euro", "eur": "euro", "£": "gbp", "¥": "yen"},
    **{"percent": "%", "percentage": "%", "pct": "%", "°c": "degC", "°f": "degF", "°": "degree", "sq": "square"},
    **{"celsius": "degC", "fahrenheit": "degF", "¢": "us_cent"},
}
_MONEY: Final = (
    "us_dollar = [us_money]",
    "us_cent = us_dollar / 100",
    "euro = [eu_money]",
    "gbp = [uk_money]",
    "yen = [jp_money]",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number with its unit."""

    value: Fraction
    """The value as written: 50 for `50 %`."""
    written: str
    """The number's text without spacing: `2/4`, or `1000` for `1,000.0`."""
    is_reduced: bool
    """True unless the number is a fraction that can be reduced."""
    unit: str
    """Text after the number, or the currency before it; "" if there is none."""
    is_letter: bool
    """True if the unit is one letter directly after the number. Such a letter may be a variable instead."""

    @property
    def is_percentage(self) -> bool:
        return self.unit == "%"


def plain(text: str) -> str:
    """Return the text without formatting, without dollar signs, and without the commands and braces around words."""
    text = _FORMULA.sub(r" \1 ", without_settings(text))
    text = _TEXT.sub(r" \1 ", text)
    text = _TEMPERATURE.sub(lambda found: f"°{found[1].upper()}", text)
    text = _SHORT_FRACTION.sub(lambda found: f"\\frac{{{found[1] or found[2]}}}{{{found[3] or found[4]}}}", text)
    text = text.lstrip(_EDGE).rstrip(_EDGE + ".")
    depth = 0
    while depth < _MOST_BRACES and text.startswith("{") and _closing_brace(text) == len(text) - 1:
        text, depth = text[1:-1].strip(_EDGE), depth + 1
    return text


def _closing_brace(text: str) -> int:
    depth = 0
    for place, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return place
    return -1


_MOST_BRACES: Final = 5
_FORMULA: Final = re.compile(r"(?<!\\)\$\$?([^$]+)(?<!\\)\$\$?")
_TEXT: Final = re.compile(r"\\text\s*\{([^{}]*)\}")
_SHORT_FRACTION: Final = re.compile(r"\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d)(?!\d))")
_TEMPERATURE: Final = re.compile(r"(?:°|\bdegrees?)\s*(c|f)(?:elsius|ahrenheit)?\b", re.IGNORECASE)
_EDGE: Final = " \t\r\n*"


def read_quantity(text: str) -> Quantity | None:
    """Parse the whole text as one quantity. Return None if the text is no quantity."""
    return _read(text) if len(text) <= _LONGEST else None


@lru_cache(_KEPT)
def _read(text: str) -> Quantity | None:
    text, sign = plain(text), 1
    if (compound := _compound(text)) is not None:
        return compound
    while (inner := _PARENTHESES.fullmatch(text)) is not None:
        sign, text = -sign if inner["sign"] == "-" else sign, inner["inner"]
    found = _QUANTITY.fullmatch(text)
    if found is None or (found["sign"] and found["inner"]):
        return None
    value = _value(found)
    unit = _unit(found["unit"])
    if value is None or unit is None:
        return None
    scale, _, rest = unit.partition(" ")
    if power := _SCALES.get(scale.lower()):
        value, unit = value * 10**power, rest
    if unit and found["money"]:
        if unit.split()[0] not in _EACH:
            return None
        unit = f"{_money(found['money'])} {unit}"
    if "-" in (found["sign"], found["inner"]):
        sign = -sign
    return Quantity(
        value=sign * value,
        written=as_written(found["number"]),
        is_reduced=_is_reduced(found),
        unit=unit or _money(found["money"]),
        is_letter=len(unit) == 1 and unit.isascii() and unit.isalpha() and not found["gap"],
    )


_EACH: Final = frozenset({"per", "a", "an", "each", "every"})
_PART: Final = r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]{1,20})"
_PARTS: Final = re.compile(rf"{_PART}(?:(?:\s*,)?\s*(?:and\s+)?{_PART}){{1,3}}")
_FEET: Final = re.compile(r"(\d{1,9})\s*'\s*(\d{1,9}(?:\.\d{1,9})?)\s*(?:\"|'')")


def _compound(text: str) -> Quantity | None:
    """Return the sum of a text such as `1 hour 30 minutes`. Return None unless each unit is smaller than the previous
    one."""
    if found := _FEET.fullmatch(text):
        text = f"{found[1]} feet {found[2]} inches"
    if not _PARTS.fullmatch(text):
        return None
    parts = [(Fraction(number), unit) for number, unit in re.findall(_PART, text)]
    value, largest = parts[0]
    before = Fraction(1)
    for number, unit in parts[1:]:
        is_minute = unit == "m" and largest.lower() in ("h", "hr", "hrs", "hour", "hours")
        ratio = unit_ratio("minute" if is_minute else unit, largest)
        if ratio is None or ratio >= before:
            return None
        value, before = value + number * ratio, ratio
    return Quantity(value=value, written=as_written(text), is_reduced=True, unit=_unit(largest) or "", is_letter=False)


_PARENTHESES: Final = re.compile(r"(?P<sign>[+-])?\((?P<inner>[^()]*)\)")


def _value(found: re.Match[str]) -> Fraction | None:
    """Return the exact value. Return None for a division by zero, and for a mixed number with an improper fraction."""
    for whole, of, by in (("whole", "of_whole", "by_whole"), ("and", "of_and", "by_and")):
        if found[whole]:
            above, below = _integer(found[of]), _integer(found[by])
            return _integer(found[whole]) + Fraction(above, below) if above < below else None
    for of, by in (("of", "by"), ("over", "under")):
        if found[of]:
            return Fraction(_integer(found[of]), _integer(found[by])) if _integer(found[by]) else None
    if power := found["braced"] or found["bare"]:
        return Fraction(10) ** int(power)
    before, _, after = found["decimal"].partition(".")
    value = Fraction(f"{_integer(before or '0')}.{after or '0'}")
    if repeated := found["repeated"]:
        value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(after))
    power = found["exponent"] or found["times_braced"] or found["times_bare"]
    return value * Fraction(10) ** int(power or 0)


def _is_reduced(found: re.Match[str]) -> bool:
    for of, by in (("of_whole", "by_whole"), ("of_and", "by_and"), ("of", "by"), ("over", "under")):
        if found[of]:
            above, below = _integer(found[of]), _integer(found[by])
            return below > 1 and gcd(above, below) == 1
    return True


def as_written(text: str) -> str:
    """Return the text without formatting of formulas and digits, for searching one text in another."""
    for pattern, meant in _SETTING:
        text = pattern.sub(meant, text)
    return text


_SETTING: Final = (
    (re.compile(r"([\^_])\{([^{}]*)\}"), r"\1\2"),
    (re.compile(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"\1/\2"),
    (re.compile(r"(?<=\d)(?:,|\\,|\{,\}|\s)(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\(?:left|right|cdot|times|quad|[,!;:])|[\s{}$*]"), ""),
    (re.compile(r"(\.\d*?)0+(?!\d)"), r"\1"),
    (re.compile(r"\.(?!\d)"), ""),
)


def _integer(digits: str) -> int:
    return int(re.sub(r"[^\d+-]", "", digits))


def _unit(text: str) -> str | None:
    """Return the unit in a normal form, or "" for an empty text. Return None if the text names no unit."""
    text = " ".join(text.split())  # With runs of spaces, the regular expression would try all ways to split them.
    if not text:
        return ""
    if not _UNIT.fullmatch(text):
        return None
    words = re.sub(r"[{}]", "", text).split()
    if SAYS_MORE & {word.lower() for word in words} or (len(text) == 1 and text not in _LETTERS):
        return None
    return " ".join(_NAMES.get(word.lower(), word) for word in words if word.lower() not in _SAYS_NOTHING)


def _money(sign: str | None) -> str:
    return _NAMES[sign.removeprefix("\\")] if sign else ""


def is_same_quantity(answer: Quantity, expected: Quantity, *, needs_unit: bool = False) -> bool:
    """Return True if both quantities are equal.

    Units are converted: 500 cm is 5 m, but 5 m is not 5 cm. An answer may omit the unit (unless it is needed), or add
    one. A percentage also equals the number that it means: 50 % is 0.5.
    """
    if answer.unit == expected.unit:
        return answer.value == expected.value
    if needs_unit and not answer.unit:
        return False
    if answer.is_percentage or expected.is_percentage:
        return _is_same_percentage(answer, expected)
    if not answer.unit:
        return answer.value == expected.value
    if not expected.unit:
        return answer.value == expected.value and not answer.is_letter
    conversion = _conversion(answer.unit, expected.unit)
    return conversion is not None and answer.value * conversion[0] + conversion[1] == expected.value


def unit_ratio(unit: str, other: str) -> Fraction | None:
    """Return the number of `other` units in one `unit`. Return None if the two units measure different things."""
    one, another = _unit(unit), _unit(other)
    if not one or not another:
        return None
    conversion = (Fraction(1), Fraction(0)) if one == another else _conversion(one, another)
    return None if conversion is None or conversion[1] else conversion[0]


def _is_same_percentage(answer: Quantity, expected: Quantity) -> bool:
    """Compare two quantities of which one is a percentage. The answer may omit the percent sign if its number exceeds
    1: numbers above 1 cannot be shares."""
    if answer.unit and expected.unit:
        return False
    in_full = [quantity.value / (100 if quantity.is_percentage else 1) for quantity in (answer, expected)]
    return in_full[0] == in_full[1] or (answer.value == expected.value and abs(expected.value) >= 1)


@lru_cache(_KEPT)
def _conversion(unit: str, other: str) -> tuple[Fraction, Fraction] | None:
    """Return the factor and the offset that convert one unit into another. Return None if they measure different
    things."""
    from pint.errors import PintError

    registry = _registry()
    units = []
    for name in (unit, other):
        with contextlib.suppress(*_UNREADABLE, PintError):
            units.append(registry.parse_units(name))
    if not units:
        return (Fraction(1), Fraction(0)) if _is_same_thing(unit, other) else None
    try:
        from_unit, to_unit = units
        found = [Fraction(registry.Quantity(Fraction(number), from_unit).to(to_unit).magnitude) for number in (0, 1, 2)]
    except (*_UNREADABLE, PintError):
        return None
    zero, one, two = found
    return (one - zero, zero) if two - one == one - zero else None  # Decibels, for example, are not linear.


def _is_same_thing(one: str, other: str) -> bool:
    """Return True if one name contains all words of the other, apart from plurals: 3 red apples are 3 apples."""
    things = [{word.lower().removesuffix("s") for word in unit.split()} for unit in (one, other)]
    return things[0] <= things[1] or things[1] <= things[0]


@lru_cache(1)
def _registry() -> UnitRegistry[Any]:
    from pint import UnitRegistry

    registry: UnitRegistry[Any] = UnitRegistry(non_int_type=Fraction, cache_folder=None)
    for definition in _MONEY:
        registry.define(definition)
    return registry
