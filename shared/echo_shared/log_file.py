"""A log file that a full disk does not stop: what it does not take is counted, and the count is written later.

Each line is handed to the system when it is logged, by whoever logs it: what a program said last before it was killed
is there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

LOG_BYTES: Final = 2**20
KEPT: Final = 2
"""Older files beside the newest one, by default."""
_MISSING: Final = "%d lines are missing here: the disk did not take them."


class LogFile(RotatingFileHandler):
    """Set aside at `max_bytes`, `kept` times. What the disk refuses still goes to all other handlers; `refused` is
    called with the first error in a row, by the thread that logs, and may log."""

    def __init__(
        self,
        file: Path,
        *,
        max_bytes: int = LOG_BYTES,
        kept: int = KEPT,
        refused: Callable[[OSError], object] = lambda error: None,
    ) -> None:
        super().__init__(file, maxBytes=max_bytes, backupCount=kept, encoding="utf-8", errors="backslashreplace")
        self.missing = 0
        """Lines that the disk did not take, since it took one."""
        self._refused = refused

    def emit(self, record: logging.LogRecord) -> None:
        """Never raises, and says nothing on standard error."""
        try:
            if self.shouldRollover(record):
                self.doRollover()
            missing = f"{self._note(record)}\n" if self.missing else ""
            self._write(f"{missing}{self.format(record)}\n")
            self.missing = 0
        except OSError as error:
            self.missing += 1
            if self.missing == 1:
                self._refused(error)
        except (TypeError, ValueError):  # What is logged does not fit its own text.
            self.handleError(record)

    def _note(self, behind: logging.LogRecord) -> str:
        """How many lines are missing, as the line before `behind`."""
        note = logging.LogRecord(__name__, logging.WARNING, __file__, 0, _MISSING, (self.missing,), None)
        note.created, note.msecs = behind.created, behind.msecs
        return self.format(note)

    def _write(self, text: str) -> None:
        """All of it, or an error and nothing."""
        if self.stream is None:
            self.stream = self._open()
        end = self.stream.seek(0, os.SEEK_END)
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            stream, self.stream = self.stream, None  # It keeps what it could not write.
            with suppress(OSError):
                stream.close()
            os.truncate(self.baseFilename, end)
            raise
