"""Files of this host that are written completely or not at all, and survive a power failure."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from echo_shared.errors import DISK_FULL, StorageError

_NO_ROOM: Final = {39, 112, errno.ENOSPC} if sys.platform == "win32" else {errno.ENOSPC, errno.EDQUOT}

_UNFINISHED: Final = ".unfinished-"
_REPLACED: Final = ".replaced-"


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, count: int, /) -> bytes:
        """Return the next `count` bytes; fewer only at the end."""


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, completely or not at all, even after a power failure. Only the file's owner may read
    it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # Remove the partial file, which would take space on a full disk.
        raise


@contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Yield an empty directory that replaces `final` when the block ends without an error.

    All files are on disk before the rename. Raises StorageError for disk errors.
    """
    unfinished = final.with_name(f"{_UNFINISHED}{final.name}")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        sync_tree(unfinished)
        if final.exists():
            replaced = final.with_name(f"{_REPLACED}{final.name}")
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
            unfinished.rename(final)
            shutil.rmtree(replaced)
        else:
            unfinished.rename(final)
        sync(final.parent)
    except OSError as error:
        got = f"{final}: {error}"
        raise disk_error("A directory could not be written.", final, got=got, code=error.errno) from error


def sync(path: Path) -> None:
    """Flush a file's content or a directory's entries to the disk, so that they survive a power failure. Blocks the
    calling thread.
    """
    if path.is_dir() and os.name == "nt":
        return  # Windows has no call that syncs a directory.
    handle = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """Flush all files below the directory, and all its entries, to the disk. Blocks the calling thread."""
    for path in (*directory.rglob("*"), directory):
        sync(path)


@contextmanager
def disk_errors(what: str, place: Path) -> Iterator[None]:
    """Convert an OSError in the block to StorageError. The StorageError's text is `what`, or says that the disk of
    `place` is full.
    """
    try:
        yield
    except OSError as error:
        raise disk_error(what, place, got=str(error), code=error.errno) from error


def disk_error(what: str, place: Path, *, got: str, code: int | None) -> StorageError:
    """Return the StorageError for an OSError with errno `code`. The StorageError's text is `what`, or says that the
    disk of `place` is full.
    """
    if code in _NO_ROOM:
        return StorageError("The disk is full.", got=got, do=f"Free some space on the disk of {place}.", code=DISK_FULL)
    return StorageError(what, got=got, do=f"Check that {place} can be read and written.")
