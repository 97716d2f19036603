"""Limit and sanitise log lines that peers (nodes and other clients) can cause.

The rate of each kind of message is limited. A value from a peer is written on one line, without terminal control
sequences.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from echo_shared.wire.messages.fields import printable_line

BURST: Final = 20
EVERY_S: Final = 5.0
"""Once a kind of line has used up its BURST, one more line is written per this many seconds."""
MOST_CHARACTERS: Final = 300
"""Largest number of characters of one peer's value that are written to the log."""


class PeerLog(logging.LoggerAdapter[logging.Logger]):
    """Wraps a logger. The kind of a message is its format string, so the number of kinds is bounded by the code.

    `theirs`: exception types caused by a peer's mistake. They are logged as one line without a traceback.
    """

    def __init__(self, logger: logging.Logger, *, theirs: tuple[type[BaseException], ...] = ()) -> None:
        super().__init__(logger, {})
        self._theirs = theirs
        self._kinds: dict[str, tuple[float, float, int]] = {}
        """For each kind of line: number of lines still allowed, time of this count, and number of lines suppressed
        since the last written line.
        """

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        error = options.get("exc_info")
        if isinstance(error, self._theirs):
            level, msg, args = logging.INFO, f"{msg}: %s", (*args, error)
            options.pop("exc_info")
        if not self.isEnabledFor(level):
            return
        left_out = self._left_out(str(msg))
        if left_out is None:
            return
        if left_out:
            msg, args = f"{msg} (and %d more like it)", (*args, left_out)
        super().log(level, msg, *map(_safe, args), **options)

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return message and arguments unchanged: this adapter adds no context to log lines."""
        return msg, kwargs

    def _left_out(self, kind: str) -> int | None:
        """Return the number of lines of this kind that were suppressed since the last written one; None to suppress
        this line as well."""
        now = time.monotonic()
        room, at, left_out = self._kinds.get(kind, (float(BURST), now, 0))
        room = min(room + (now - at) / EVERY_S, float(BURST))
        if room < 1:
            self._kinds[kind] = room, now, left_out + 1
            return None
        self._kinds[kind] = room - 1, now, 0
        return left_out


def _safe(value: object) -> object:
    return value if isinstance(value, int | float | Mapping) else printable_line(str(value))[:MOST_CHARACTERS]
