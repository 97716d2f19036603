"""A torrent's directory being filled piece by piece: only what matches its hash reaches the disk.

The files have their full size from the start, with holes where pieces are missing. libtorrent, or another process,
goes on from them. Writes go to the system's page cache: a piece of 64 KiB takes some microseconds.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from echo_shared.errors import CodecError
from echo_shared.swarm.base import storage_error
from echo_shared.swarm.torrent import FileSlice, Layout, piece_hash

_READ_BYTES: Final = 2**20


class PieceFile:
    """Holds one of the files open between writes. Used by one thread at a time; call `close` in the end."""

    def __init__(self, layout: Layout, parent: Path) -> None:
        self.layout = layout
        self.directory = parent / layout.name
        self.missing = set(range(len(layout.piece_hashes)))
        self.done_bytes = 0
        self._open: tuple[str, io.FileIO] | None = None

    @property
    def complete(self) -> bool:
        return not self.missing

    def open(self) -> None:
        """Gives every file its full size, and takes over what is there and matches its hash. Blocks; StorageError."""
        with self._on_disk():
            found = [self._make_room(path, size) for path, size in self.layout.files]
        if any(found):
            try:
                for piece in sorted(self.missing):
                    if piece_hash(self._read(piece)) == self.layout.piece_hashes[piece]:
                        self._count(piece)
            finally:
                self.close()

    def write(self, piece: int, data: bytes) -> bool:
        """Puts a piece where it belongs; False when it was there already.

        Raises CodecError, and writes nothing, when it is not what the torrent says; StorageError.
        """
        if not 0 <= piece < len(self.layout.piece_hashes) or piece_hash(data) != self.layout.piece_hashes[piece]:
            raise CodecError(
                f"A piece of {self.layout.name} does not match its hash.", got=f"piece {piece}, {len(data)} bytes"
            )
        if piece not in self.missing:
            return False
        rest = memoryview(data)
        with self._on_disk():
            for part in self.layout.slices(piece, piece + 1):
                self._write(part, rest[: part.length])
                rest = rest[part.length :]
        self._count(piece)
        return True

    def close(self) -> None:
        """Closes what is open; a later `write` opens it again. Raises StorageError."""
        if self._open is not None:
            file, self._open = self._open[1], None
            with self._on_disk():
                file.close()

    def _count(self, piece: int) -> None:
        self.missing.discard(piece)
        self.done_bytes += self.layout.size_of_piece(piece)

    def _make_room(self, name: str, size: int) -> bool:
        """Whether there was anything in this file."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            had_bytes = file.tell()
            if had_bytes != size:
                file.truncate(size)
        return had_bytes > 0

    def _read(self, piece: int) -> bytes:
        data = bytearray()
        with self._on_disk():
            for part in self.layout.slices(piece, piece + 1):
                file, end = self._at(part), len(data) + part.length
                while len(data) < end and (read := file.read(min(end - len(data), _READ_BYTES))):
                    data += read
        return bytes(data)

    def _write(self, part: FileSlice, data: memoryview) -> None:
        file = self._at(part)
        while data:  # An unbuffered file takes less than all when the disk is nearly full.
            data = data[file.write(data) :]

    def _at(self, part: FileSlice) -> io.FileIO:
        """The file of `part`, at its offset. One is open at a time: a torrent may have thousands."""
        if self._open is None or self._open[0] != part.path:
            self.close()
            self._open = part.path, io.FileIO(self.directory / part.path, "r+")
        file = self._open[1]
        file.seek(part.offset)
        return file

    @contextmanager
    def _on_disk(self) -> Iterator[None]:
        """The disk's refusals as StorageError."""
        try:
            yield
        except OSError as error:
            raise storage_error(str(error), code=error.errno, path=self.directory) from error
