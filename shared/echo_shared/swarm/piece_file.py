"""A torrent's directory being filled piece by piece: only what matches its hash reaches the disk.

The files have their full size from the start, with holes where pieces are missing. libtorrent, or another process,
goes on from them. Writes go to the system's page cache: a piece of 64 KiB takes some microseconds. Where files have no
holes (NTFS, exFAT) the first write near a file's end makes the system write zeros up to there, seconds for a large
file; `open`, which is for a thread, writes every file's last byte, so no later write has to wait for that.
"""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Final

from echo_shared.errors import CodecError, SwarmError
from echo_shared.swarm.disk import on_disk
from echo_shared.swarm.torrent import FileSlice, Layout, piece_hash

GIVEN_UP: Final = "given_up"
"""The code of the SwarmError that tells those who wait for an artefact that it does not come."""
_READ_BYTES: Final = 2**20


class PieceFile:
    """Holds one of the files open between writes. Used by one thread at a time; call `close` in the end.

    Other threads may read what has come, by an `ArrivingFile`.
    """

    def __init__(self, layout: Layout, parent: Path) -> None:
        self.layout = layout
        self.directory = parent / layout.name
        self.missing = set(range(len(layout.piece_hashes)))
        self.done_bytes = 0
        self._open: tuple[str, io.FileIO] | None = None
        self._next = 0
        """The first piece that is missing."""
        self._arrival = threading.Condition()
        self._given_up = False

    @property
    def complete(self) -> bool:
        return not self.missing

    def open(self) -> None:
        """Gives every file its full size, and takes over what is there and matches its hash. Blocks; StorageError."""
        with on_disk(self.directory):
            found = [self._make_room(path, size) for path, size in self.layout.files]
        if any(found):
            try:
                for piece in sorted(self.missing):
                    if piece_hash(self._read(piece)) == self.layout.piece_hashes[piece]:
                        self._count(piece)
            finally:
                self.close()

    def has(self, piece: int) -> bool:
        """Whether it is there already."""
        return 0 <= piece < len(self.layout.piece_hashes) and piece not in self.missing

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
        with on_disk(self.directory):
            for part in self.layout.slices(piece, piece + 1):
                self._write(part, rest[: part.length])
                rest = rest[part.length :]
        self._count(piece)
        return True

    def close(self) -> None:
        """Closes what is open; a later `write` opens it again. Raises StorageError."""
        if self._open is not None:
            file, self._open = self._open[1], None
            with on_disk(self.directory):
                file.close()

    def give_up(self) -> None:
        """No more is written: who waits for it need not wait."""
        with self._arrival:
            self._given_up = True
            self._arrival.notify_all()

    def await_bytes(self, count: int) -> None:
        """Returns once the first `count` bytes of all are there. For other threads.

        Raises SwarmError with the code `GIVEN_UP` when they do not come any more.
        """
        with self._arrival:
            self._arrival.wait_for(lambda: self._given_up or self._next * self.layout.piece_bytes >= count)
            if self._next * self.layout.piece_bytes < count:
                raise SwarmError(f"{self.layout.name} does not come whole.", code=GIVEN_UP)

    def _count(self, piece: int) -> None:
        self.missing.discard(piece)
        self.done_bytes += self.layout.size_of_piece(piece)
        if piece == self._next:
            with self._arrival:
                while self._next < len(self.layout.piece_hashes) and self._next not in self.missing:
                    self._next += 1
                self._arrival.notify_all()

    def _make_room(self, name: str, size: int) -> bool:
        """Whether there was anything in this file."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            had_bytes = file.tell()
            if had_bytes > size:
                file.truncate(size)
            elif had_bytes < size:
                file.truncate(size - 1)
                file.write(b"\0")  # At the end, as all of this file's writes: it was opened to append.
        return had_bytes > 0

    def read(self, piece: int) -> bytes:
        """A piece that has come, from the page cache as a rule. Raises StorageError."""
        return self._read(piece)

    def _read(self, piece: int) -> bytes:
        data = bytearray()
        with on_disk(self.directory):
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


class ArrivingFile:
    """The first file of `pieces`, read in order by a thread of its own while it arrives: `read` waits for it."""

    def __init__(self, pieces: PieceFile) -> None:
        path, self._left_bytes = pieces.layout.files[0]
        self._pieces = pieces
        self._read_bytes = 0
        with on_disk(pieces.directory):
            self._file = (pieces.directory / path).open("rb")

    def read(self, count: int, /) -> bytes:
        """The next `count` bytes, fewer at the file's end. Raises SwarmError with the code `GIVEN_UP`, StorageError."""
        count = min(count, self._left_bytes)
        self._pieces.await_bytes(self._read_bytes + count)
        with on_disk(self._pieces.directory):
            data = self._file.read(count)
        self._left_bytes -= count
        self._read_bytes += count
        return data

    def close(self) -> None:
        self._file.close()
