"""Log lines that others can cause: so many of a kind, one line each, and nothing in them that steers a terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from echo_shared.messages.fields import printable_line

BURST: Final = 20
EVERY_S: Final = 5.0
"""One more line of a kind, once the burst is used up."""
MOST_CHARACTERS: Final = 300
"""Of one thing that a peer said."""


class PeerLog(logging.LoggerAdapter[logging.Logger]):
    """In front of a logger. A kind is a message's text before its values are put in: there are as many as in the code.

    `theirs` are errors that say what a peer did wrong: they are told as one line, without where in the code.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        theirs: tuple[type[BaseException], ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(logger, {})
        self._theirs = theirs
        self._clock = clock
        self._kinds: dict[str, tuple[float, float, int]] = {}
        """Lines that may still come, as of when, and how many did not since the last."""

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
        """As they are: there is nothing to add."""
        return msg, kwargs

    def _left_out(self, kind: str) -> int | None:
        """How many lines of this kind were left out before this one; None when this one is, too."""
        now = self._clock()
        room, at, left_out = self._kinds.get(kind, (float(BURST), now, 0))
        room = min(room + (now - at) / EVERY_S, float(BURST))
        if room < 1:
            self._kinds[kind] = room, now, left_out + 1
            return None
        self._kinds[kind] = room - 1, now, 0
        return left_out


def _safe(value: object) -> object:
    return value if isinstance(value, int | float | Mapping) else printable_line(str(value))[:MOST_CHARACTERS]
