"""Reads a log's last lines and its new lines, across file rotation.

A full `node.log` becomes `node.log.1`, later `node.log.2`. No file stays open between calls, because Windows would then
refuse to rename it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from echo_shared.errors import StorageError
from echo_shared.logs.log_file import KEPT
from echo_shared.wire.messages.fields import printable


class LogReader:
    """Reads one log from its end; the log may not exist yet. Up to `kept` rotated files are read.

    Control characters are replaced, because a log contains text from untrusted peers and libraries.
    """

    def __init__(self, path: Path, *, kept: int = KEPT) -> None:
        self._path = path
        self._kept = kept
        self._identity: tuple[int, int] | None = None
        """Device and inode of the file that the previous call read. If the path leads to another file now, the log was
        rotated.
        """
        self._offset = 0
        self._rest = b""
        """Bytes of an incomplete last line."""

    def last(self, count: int) -> list[str]:
        """Return the last `count` lines, oldest first. Later calls of `more` yield the lines that follow. Raises
        StorageError.
        """
        found: list[bytes] = []
        for path in [self._path, *self._older()]:
            data = self._read(path, 0)
            if data is None:
                continue
            if path == self._path:
                whole, self._rest = _cut(data)
                self._identity, self._offset = _identity(path), len(data)
            else:
                whole = data
            found = whole.splitlines() + found
            if len(found) >= count:
                break
        return [_line(one) for one in found[max(0, len(found) - count) :]]

    def more(self) -> Iterator[str]:
        """Yield the complete lines that were added since the last call of `last` or `more`. Raises StorageError."""
        now = _identity(self._path)
        if now is None:
            return
        if now != self._identity:
            yield from self._rest_of_former()
            self._identity, self._offset = now, 0
        yield from self._read_on(self._path)

    def _rest_of_former(self) -> Iterator[str]:
        """Yield the unread lines of the previous log file, which was renamed by rotation."""
        former = next((path for path in self._older() if self._identity and _identity(path) == self._identity), None)
        if former is not None:
            yield from self._read_on(former)
        if self._rest:
            yield _line(self._rest)
            self._rest = b""

    def _read_on(self, path: Path) -> Iterator[str]:
        data = self._read(path, self._offset)
        if data:
            self._offset += len(data)
            whole, self._rest = _cut(self._rest + data)
            yield from map(_line, whole.splitlines())

    def _older(self) -> list[Path]:
        return [self._path.with_name(f"{self._path.name}.{number}") for number in range(1, self._kept + 1)]

    def _read(self, path: Path, offset: int) -> bytes | None:
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(
                "The log cannot be read.", got=f"{path}: {error.strerror}", do="Make it readable, or delete it."
            ) from error


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _cut(data: bytes) -> tuple[bytes, bytes]:
    end = data.rfind(b"\n") + 1
    return data[:end], data[end:]


def _line(data: bytes) -> str:
    return printable(data.decode("utf-8", "replace"))
