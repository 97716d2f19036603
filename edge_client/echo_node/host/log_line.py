"""Parse the lines of the node's own log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_ENTRY: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log."""

    at: str | None
    """Local time of the entry; None = continuation of an earlier entry, such as a traceback."""
    text: str


def line_of(text: str) -> LogLine:
    """Parse one line of the log."""
    entry = _ENTRY.fullmatch(text)
    return LogLine(None, text) if entry is None else LogLine(entry[1], entry[2])
