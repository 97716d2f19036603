"""The node's log as its owner reads it: the last lines, and what comes behind them, across the files' rotation.

The log is `node.log`; what was in it before it grew too long is in `node.log.1`, and before that in `node.log.2`. No
file stays open between two looks: Windows would not let the node rename it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_shared.errors import StorageError
from echo_shared.messages.fields import printable

KEPT: Final = 2
"""Older files beside the newest one."""
_ENTRY: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log."""

    at: str | None
    """Local time, as the log has it; None = it belongs to the entry that began before it, as those of a traceback."""
    text: str


class LogReader:
    """Reads one log from its end on; it need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        """Of the file that was read last."""
        self._offset = 0
        self._rest = b""
        """The beginning of a line that is not whole yet."""

    def last(self, count: int) -> list[Line]:
        """The last `count` lines, oldest first; `more` goes on behind them. Raises StorageError."""
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

    def more(self) -> Iterator[Line]:
        """The whole lines that have come since. Raises StorageError."""
        now = _identity(self._path)
        if now is None:
            return
        if now != self._identity:
            yield from self._rest_of_former()
            self._identity, self._offset = now, 0
        yield from self._read_on(self._path)

    def _rest_of_former(self) -> Iterator[Line]:
        """What was written to the file that has another name now, after it was read last."""
        former = next((path for path in self._older() if self._identity and _identity(path) == self._identity), None)
        if former is not None:
            yield from self._read_on(former)
        if self._rest:
            yield _line(self._rest)
            self._rest = b""

    def _read_on(self, path: Path) -> Iterator[Line]:
        data = self._read(path, self._offset)
        if data:
            self._offset += len(data)
            whole, self._rest = _cut(self._rest + data)
            yield from map(_line, whole.splitlines())

    def _older(self) -> list[Path]:
        return [self._path.with_name(f"{self._path.name}.{number}") for number in range(1, KEPT + 1)]

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
    """Whole lines, and the rest."""
    end = data.rfind(b"\n") + 1
    return data[:end], data[end:]


def _line(data: bytes) -> Line:
    text = data.decode("utf-8", "replace")
    entry = _ENTRY.fullmatch(text)
    # A log holds what hubs and libraries said: a terminal is not to obey it.
    return Line(None, printable(text)) if entry is None else Line(entry[1], printable(entry[2]))
