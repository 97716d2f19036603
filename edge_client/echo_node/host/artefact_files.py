"""Artefacts on this disk: verification markers, disk space, and removal.

An artefact counts only if its marker, `<name>.verified` next to its directory, names its content. Size and modification
time of each file must match those recorded when the file was hashed. The marker is written last and deleted first. A
marker may name a file outside the directory that replaces some files (`echo_node.host.base_forms`).

A power cut may leave a marker without its files. A base model is too large to be hashed at each start, so its files are
synced to disk before its marker is written. A policy version must not wait for the disk; a restarted node hashes the
files again.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from echo_node.core.policies import OnDisk
from echo_shared.artefacts.hashed_files import describe_file
from echo_shared.artefacts.manifest import Manifest, content_of
from echo_shared.errors import DISK_FULL, CodecError, StorageError, SwarmError
from echo_shared.files.atomic import sync
from echo_shared.swarm.disk import on_disk
from echo_shared.wire.codec import decode_from_node, encode
from echo_shared.wire.messages import (
    Fetched,
)

log = logging.getLogger(__name__)

MARKER_SUFFIX: Final = ".verified"
CONTENT_DIGITS: Final = 32
MOST_HEADROOM_BYTES: Final = 256 * 2**20
HEADROOM_SHARE: Final = 0.05
"""Free space that a fetch leaves: this fraction of the disk, but at most MOST_HEADROOM_BYTES."""
_OUTSIDE: Final = "../"


class _Marker(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    content: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    files: dict[str, tuple[int, int]]
    """(size in bytes, modification time in nanoseconds) of each file, by its path relative to the
    artefact's directory.
    """
    fetched_hex: str
    """The Fetched message that was sent to the hub, encoded as hexadecimal."""


def read_marker(directory: Path, *, hash_again: bool = False) -> OnDisk | None:
    """Return the artefact if it is verified and unchanged, else None. `hash_again`: hash all its files again. Blocks
    the calling thread.
    """
    marker = _read(directory)
    if marker is None:
        return None
    try:
        fetched = decode_from_node(bytes.fromhex(marker.fetched_hex))
        changed = marker.files != _stats(directory, marker.files)
        if hash_again and not changed:
            files = [describe_file(directory / path, name=path) for path in marker.files]
            changed = marker.content != content_of(directory.name, files)
    except (OSError, ValueError, CodecError, SwarmError):
        return None
    return None if changed or not isinstance(fetched, Fetched) else OnDisk(content=marker.content, fetched=fetched)


def write_marker(directory: Path, manifest: Manifest, fetched: Fetched) -> None:
    """Write the marker, the file that records that the artefact is verified. Raises StorageError."""
    with on_disk(directory):
        if manifest.kind == "base":
            for file in manifest.files:
                sync(directory / file.path)
        files = _stats(directory, (file.path for file in manifest.files))
        _write(directory, _Marker(content=manifest.content, files=files, fetched_hex=encode(fetched).hex()))


def let_stand_in(directory: Path, file: Path, *, instead_of: str) -> None:
    """Record in the marker, if there is one, that `file` replaces the artefact's files that match the pattern
    `instead_of`.

    These files may then be deleted. Raises StorageError.
    """
    marker = _read(directory)
    if marker is None:
        return
    with on_disk(directory):
        own = [path for path in marker.files if not path.startswith(_OUTSIDE) and not Path(path).match(instead_of)]
        files = _stats(directory, [*own, Path(os.path.relpath(file, directory)).as_posix()])
        if files != marker.files:
            _write(directory, marker.model_copy(update={"files": files}))
            sync(_marker(directory))
            sync(directory.parent)


def stands_in(directory: Path) -> bool:
    """Return True if a file outside `directory` replaces some of the artefact's files."""
    marker = _read(directory)
    return marker is not None and any(path.startswith(_OUTSIDE) for path in marker.files)


def recorded_files(directory: Path) -> tuple[str, ...]:
    """Return the paths of the artefact's files, relative to `directory`, as its marker records them; empty without a
    marker."""
    marker = _read(directory)
    return () if marker is None else tuple(marker.files)


def unmark(directory: Path) -> None:
    """Delete the artefact's marker, so that the artefact counts as missing. Its files stay. Raises StorageError."""
    with on_disk(directory):
        _marker(directory).unlink(missing_ok=True)


def content_here(directory: Path) -> str | None:
    """Return the id of the artefact's content; None if the artefact is unverified or changed."""
    verified = read_marker(directory)
    return None if verified is None else verified.content[:CONTENT_DIGITS]


def delete_changed(directory: Path) -> None:
    """Delete an artefact that changed after its verification. A partial fetch, which has no marker, is kept. Raises
    StorageError.
    """
    if _marker(directory).exists():
        log.warning("%s has changed since it was verified, and is fetched again.", directory.name)
        delete_artefact(directory)


def delete_artefact(directory: Path) -> None:
    """Delete an artefact, its marker first. Raises StorageError."""
    with on_disk(directory):
        _marker(directory).unlink(missing_ok=True)
        if directory.exists():
            shutil.rmtree(directory)


def try_to_delete(directory: Path) -> None:
    """Delete an artefact. Only log a failure, because a virus scanner may hold a file open."""
    try:
        delete_artefact(directory)
    except StorageError as error:
        log.warning("%s could not be deleted: %s", directory.name, error)


def check_room(parent: Path, title: str, files: Iterable[tuple[Path, int]], *, more_bytes: int = 0) -> None:
    """Raise StorageError unless the missing bytes of `files` (path, size) and `more_bytes` fit on the disk
    of `parent`.
    """
    with on_disk(parent):
        parent.mkdir(parents=True, exist_ok=True)
        missing_bytes = sum(size_bytes - min(size_bytes, _allocated_bytes(path)) for path, size_bytes in files)
        missing_bytes += more_bytes
        disk = shutil.disk_usage(parent)
    usable_bytes = disk.free - headroom_bytes(disk.total)
    if missing_bytes > max(0, usable_bytes):
        raise StorageError(
            f"The disk is full: {title} does not fit on it.",
            got=f"up to {missing_bytes / 2**20:,.0f} MiB needed, {disk.free / 2**20:,.0f} MiB free",
            do=f"Free some space on the disk of {parent}, or use another disk: --data-dir DIR",
            code=DISK_FULL,
        )


def headroom_bytes(disk_bytes: int) -> int:
    """Return the bytes to leave free on a disk of this size."""
    return min(MOST_HEADROOM_BYTES, int(HEADROOM_SHARE * disk_bytes))


def _read(directory: Path) -> _Marker | None:
    try:
        return _Marker.model_validate_json(_marker(directory).read_bytes())
    except (OSError, ValueError):
        return None


def _write(directory: Path, marker: _Marker) -> None:
    path = _marker(directory)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(marker.model_dump_json(), encoding="utf-8")
    temporary.replace(path)


def _marker(directory: Path) -> Path:
    return directory.with_name(directory.name + MARKER_SUFFIX)


def _stats(directory: Path, paths: Iterable[str]) -> dict[str, tuple[int, int]]:
    # Normalise paths as text: if the directory is a symbolic link, `..` would lead elsewhere.
    stats = {path: Path(os.path.normpath(directory / path)).stat() for path in paths}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def _allocated_bytes(path: Path) -> int:
    """Return the bytes that the file occupies on disk. A partial fetch may have its full size, but with holes."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0
    blocks: int | None = getattr(found, "st_blocks", None)  # On Windows, `stat` gives no number of blocks.
    return found.st_size if blocks is None else min(found.st_size, 512 * blocks)
