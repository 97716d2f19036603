"""Why the last daemon ended, where a hub has ended it: for who looks later, and finds no node running."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from echo_node.core.notices import Notice
from echo_shared.files import write_private

log = logging.getLogger(__name__)


class LastWord:
    """last_word.json; no file = a daemon runs, or its owner has ended it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> Notice | None:
        """None also where the file cannot be understood."""
        try:
            fields = json.loads(self._file.read_text(encoding="utf-8"))
            return Notice(str(fields["title"]), str(fields["text"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, notice: Notice | None) -> None:
        """None: there is nothing to say. What cannot be written is in the log."""
        try:
            if notice is None:
                self._file.unlink(missing_ok=True)
            else:
                write_private(self._file, json.dumps({"title": notice.title, "text": notice.text}).encode())
        except OSError as error:
            log.warning("Why the node ended cannot be kept: %s: %s", self._file, error.strerror)
