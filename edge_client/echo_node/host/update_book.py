"""The record of update attempts. It lies next to the installation, and all nodes of the installation share it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from echo_node.core.updating import Try, against_try
from echo_shared.files.atomic import disk_errors, write_private

_FILE: Final = "updates.json"
_WAIT_S: Final = 5.0


class UpdateBook:
    """File updates.json in the installer's own directory."""

    def __init__(self, home: Path) -> None:
        self._file = home / _FILE

    def tries(self) -> tuple[Try, ...] | None:
        """Return the update attempts, newest last; None if the file is unreadable."""
        try:
            fields = json.loads(self._file.read_text(encoding="utf-8"))
            return tuple(
                Try(name=str(one["name"]), at=float(one["at"]), outcome=str(one["outcome"])) for one in fields["tries"]
            )
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def begin(self, name: str, now: float) -> bool:
        """Record the start of an update attempt. Return False if earlier ones forbid another. Raises StorageError."""
        with disk_errors("An update cannot be recorded, so none is made.", self._file.parent):
            try:
                with FileLock(self._file.with_suffix(".lock"), timeout=_WAIT_S):
                    tries = self.tries()
                    if tries is None or against_try(tries, name, now) is not None:
                        return False
                    self._save((*tries, Try(name=name, at=now)))
                    return True
            except Timeout:
                return False

    def end(self, name: str, outcome: str) -> None:
        """Record the result of the update attempt with this `name`. Raises StorageError."""
        tries = self.tries() or ()
        with disk_errors("The result of the update cannot be recorded.", self._file.parent):
            self._save(tuple(Try(name=name, at=one.at, outcome=outcome) if one.name == name else one for one in tries))

    def _save(self, tries: tuple[Try, ...]) -> None:
        rows = [{"name": one.name, "at": one.at, "outcome": one.outcome} for one in tries]
        write_private(self._file, json.dumps({"tries": rows}).encode())
