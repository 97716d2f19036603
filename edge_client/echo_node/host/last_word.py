"""The reason why a hub ended the last daemon, stored on disk. Commands show it when no node runs."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from echo_node.core.notices import Notice
from echo_shared.files.atomic import write_private

log = logging.getLogger(__name__)


class LastWord:
    """File last_word.json. It is missing while a daemon runs, and after the owner ended the daemon."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> Notice | None:
        """Return the stored notice; None if there is no readable file."""
        try:
            fields = json.loads(self._file.read_text(encoding="utf-8"))
            return Notice(str(fields["title"]), str(fields["text"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, notice: Notice | None) -> None:
        """Store the notice; None deletes it. A failure is only logged."""
        try:
            if notice is None:
                self._file.unlink(missing_ok=True)
            else:
                write_private(self._file, json.dumps({"title": notice.title, "text": notice.text}).encode())
        except OSError as error:
            log.warning("The reason of the node's end cannot be stored: %s: %s", self._file, error.strerror)
