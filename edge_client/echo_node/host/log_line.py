"""The lines of the node's own log: what `echo-node` writes before each entry, taken apart again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_ENTRY: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log."""

    at: str | None
    """Local time, as the log has it; None = it belongs to the entry that began before it, as those of a traceback."""
    text: str


def line_of(text: str) -> Line:
    """What the log has as `text`."""
    entry = _ENTRY.fullmatch(text)
    return Line(None, text) if entry is None else Line(entry[1], entry[2])
