"""Strict JSON reader for data files. It refuses JSON that other readers would interpret differently or reject.

Python's reader accepts `NaN` and `Infinity`, reads `1e999` as infinity, keeps the last of two equal keys, accepts an
unpaired surrogate (`"\\ud83d"`), and raises RecursionError for deep nesting.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

MOST_NESTED: Final = 100
"""Maximum depth of nested lists and maps, far below the recursion limit of Python and of other readers."""
_MOST_DIGITS: Final = 4_300
"""Maximum digits of an integer: the limit of Python's conversion from text to int."""
_SHOWN_CHARACTERS: Final = 40


def read_json(content: bytes) -> Any:
    """Parse a JSON text in UTF-8; a leading byte order mark is skipped.

    Raises ValueError whose text is a clause for the caller's sentence, such as "it is not UTF-8, at byte 7".
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8, at byte {error.start + 1}") from error
    try:
        value = json.loads(
            text,
            parse_constant=_refused_constant,
            parse_float=_finite,
            parse_int=_whole,
            object_pairs_hook=_without_repetition,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise _nested() from error
    if text.count("[") + text.count("{") > MOST_NESTED and _depth_of(value) > MOST_NESTED:
        raise _nested()
    if "\\u" in text:
        _check_characters(value)
    return value


def _refused_constant(name: str) -> None:
    raise ValueError(f"it contains {name}, which is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"it contains the number {_shown(digits)}, which is too large")
    return number


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it contains a number of {len(digits)} digits; the limit is {_MOST_DIGITS}")
    return int(digits)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {_shown(ascii(twice))} more than once")
    return found


def _check_characters(value: Any) -> None:
    for text in texts_in(value):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"
            raise ValueError(f"it contains {half}, one half of a character without the other") from error


def texts_in(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, dictionary keys included."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                yield text
            case dict() as entries:
                waiting += [*entries, *entries.values()]
            case list() | tuple() as items:
                waiting += items


def _depth_of(value: Any) -> int:
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [below for one in level for below in (one.values() if isinstance(one, dict) else one)]
    return depth


def _nested() -> ValueError:
    return ValueError(f"it nests lists and maps more than {MOST_NESTED} deep")


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
