"""Log files of limited size.

`LogFile` survives a full disk: lines that cannot be written are counted, and the count is logged later.

Each line reaches the operating system before the logging call returns, so the last line before a kill is in the file.
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
"""Default number of older log files to keep."""
_MISSING: Final = "%d lines are missing here, because the disk could not be written."


def append_printed(log: Path, printed: bytes) -> None:
    """Append what a program has printed to its log. A log above `LOG_BYTES` is renamed first, and replaces the one
    renamed before. Raises OSError."""
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.replace(log.with_name(log.name + ".old"))
    with log.open("ab") as file:
        file.write(printed)


class LogFile(RotatingFileHandler):
    """Log handler that rotates at `max_bytes` and keeps `kept` older files. Its disk errors do not affect other
    handlers.

    `refused`, which may log, is called in the logging thread with the first disk error after a successful write.
    """

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
        """Lines lost to disk errors since the last successful write."""
        self._refused = refused

    def emit(self, record: logging.LogRecord) -> None:
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
        except (TypeError, ValueError):  # The record's arguments do not fit its format string.
            self.handleError(record)

    def _note(self, behind: logging.LogRecord) -> str:
        """Return the line that reports how many lines are missing. It has the time of `behind`, the record that follows
        it.
        """
        note = logging.LogRecord(__name__, logging.WARNING, __file__, 0, _MISSING, (self.missing,), None)
        note.created, note.msecs = behind.created, behind.msecs
        return self.format(note)

    def _write(self, text: str) -> None:
        """Write all of `text`. On an error, write nothing and raise."""
        if self.stream is None:
            self.stream = self._open()
        end = self.stream.seek(0, os.SEEK_END)
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            stream, self.stream = self.stream, None  # Close the stream, and drop it: its buffer still holds the text.
            with suppress(OSError):
                stream.close()
            os.truncate(self.baseFilename, end)
            raise
