"""Compare two release numbers."""

from __future__ import annotations

import re
from typing import Final

_NUMBERS: Final = re.compile(r"\d{1,9}(?:\.\d{1,9})*")


def is_newer(theirs: str, own: str) -> bool:
    """Return True if `theirs` is later than `own`, by their leading numbers; False if either has none."""
    numbers = [_numbers(version) for version in (theirs, own)]
    return all(numbers) and numbers[0] > numbers[1]


def _numbers(version: str) -> tuple[int, ...]:
    found = _NUMBERS.match(version)
    parts = [] if found is None else [int(part) for part in found.group().split(".")]
    while parts and parts[-1] == 0:
        del parts[-1]  # Drop final zeros, because release 1.0 equals release 1.
    return tuple(parts) if found is None or parts else (0,)
