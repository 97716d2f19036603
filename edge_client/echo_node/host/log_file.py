"""A log file that a full disk does not stop: what it does not take is counted, and the count is written later."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

LOG_BYTES: Final = 2**20


class LogFile(RotatingFileHandler):
    """Set aside at LOG_BYTES, twice. What the disk refuses still goes to all other handlers."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, maxBytes=LOG_BYTES, backupCount=2, encoding="utf-8")
        self.missing = 0
        """Lines that the disk did not take, since it took one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Never raises, and says nothing on standard error."""
        try:
            if self.shouldRollover(record):
                self.doRollover()
            missing = f"{self.missing} lines are missing here: the disk did not take them.\n" if self.missing else ""
            self._write(f"{missing}{self.format(record)}\n")
            self.missing = 0
        except OSError:
            self.missing += 1

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
