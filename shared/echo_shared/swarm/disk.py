"""Converts disk errors on fetched files to StorageError."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from echo_shared.errors import StorageError
from echo_shared.files.atomic import disk_error, disk_errors

_CANNOT: Final = "A fetched file cannot be written or read."


def on_disk(path: Path) -> AbstractContextManager[None]:
    """Convert an OSError of a `with` block on the fetched file at `path` to StorageError."""
    return disk_errors(_CANNOT, path)


def storage_error(error: str, *, code: int | None, path: Path) -> StorageError:
    """Return the StorageError for a libtorrent disk error at `path`; `code` is the errno, if known."""
    return disk_error(_CANNOT, path, got=error, code=code)
