"""What the disk refuses of a fetched file, as an error that says what to do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from echo_shared.errors import StorageError
from echo_shared.files import disk_error, disk_errors

_CANNOT: Final = "A fetched file cannot be written or read."


def on_disk(path: Path) -> AbstractContextManager[None]:
    """A block in which what the disk refuses of the fetched file at `path` is raised as StorageError."""
    return disk_errors(_CANNOT, path)


def storage_error(error: str, *, code: int | None, path: Path) -> StorageError:
    """The StorageError for what libtorrent says of the disk at `path`; `code` is the system's, if it is known."""
    return disk_error(_CANNOT, path, got=error, code=code)
