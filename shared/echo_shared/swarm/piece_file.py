"""A torrent's directory that is filled piece by piece. Only pieces that match their hash are written.

The files have their full size from the start, with holes for missing pieces, so libtorrent or another process can
resume from them. Writes go to the page cache: a piece of 64 KiB takes microseconds.

On file systems without holes (NTFS, exFAT), the first write near a file's end fills everything before it with zeros,
which takes seconds for a large file. `open`, which runs in a thread, therefore writes each file's last byte, so that no
later write is slow.
"""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import BinaryIO, Final

from echo_shared.errors import CodecError, SwarmError
from echo_shared.swarm.disk import on_disk
from echo_shared.swarm.torrent import FileSlice, TorrentLayout, piece_hash

GIVEN_UP: Final = "given_up"
"""Code of the SwarmError for waiting readers of an artefact that will not be completed."""
_READ_BYTES: Final = 2**20


class PieceFile:
    """Reads and writes pieces of a torrent, from one thread at a time. Only one file is open at a time; call `close` at
    the end.

    Other threads may read the bytes that have arrived through an `ArrivingFile`.
    """

    def __init__(self, layout: TorrentLayout, parent: Path) -> None:
        self.layout = layout
        self.directory = parent / layout.name
        self.missing = set(range(len(layout.piece_hashes)))
        self.done_bytes = 0
        self._open: tuple[str, io.FileIO] | None = None
        self._next = 0
        """Index of the first missing piece."""
        self._arrival = threading.Condition()
        self._given_up = False

    @property
    def complete(self) -> bool:
        return not self.missing

    def open(self) -> None:
        """Give every file its full size, and find the pieces on disk that match their hash. Blocks the calling thread.
        Raises StorageError.
        """
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
        """Return True if the piece has arrived. False for an index outside the torrent."""
        return 0 <= piece < len(self.layout.piece_hashes) and piece not in self.missing

    def write(self, piece: int, data: bytes) -> bool:
        """Write a piece to its place; return False if it had already arrived.

        Raises CodecError, and writes nothing, if the piece does not match the torrent's hash; StorageError for disk
        errors.
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
        """Close the open file; the next access opens it again. Raises StorageError."""
        if self._open is not None:
            file, self._open = self._open[1], None
            with on_disk(self.directory):
                file.close()

    def give_up(self) -> None:
        """End the wait of all readers, because no further piece will be written."""
        with self._arrival:
            self._given_up = True
            self._arrival.notify_all()

    def await_bytes(self, count: int) -> None:
        """Block until the first `count` bytes of the artefact have arrived. For threads that read.

        Raises SwarmError with the code `GIVEN_UP` if they will not arrive (`give_up`).
        """
        with self._arrival:
            self._arrival.wait_for(lambda: self._given_up or self._next * self.layout.piece_bytes >= count)
            if self._next * self.layout.piece_bytes < count:
                raise SwarmError(f"The fetch of {self.layout.name} ended before it was complete.", code=GIVEN_UP)

    def _count(self, piece: int) -> None:
        self.missing.discard(piece)
        self.done_bytes += self.layout.size_of_piece(piece)
        if piece == self._next:
            with self._arrival:
                while self._next < len(self.layout.piece_hashes) and self._next not in self.missing:
                    self._next += 1
                self._arrival.notify_all()

    def _make_room(self, name: str, size: int) -> bool:
        """Make the file, if it is missing, and give it its full size. Return True if it already had content, so that
        its pieces must be checked.
        """
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            had_bytes = file.tell()
            if had_bytes > size:
                file.truncate(size)
            elif had_bytes < size:
                file.truncate(size - 1)
                file.write(b"\0")  # Written at the end: append mode ignores the position.
        return had_bytes > 0

    def read(self, piece: int) -> bytes:
        """Return the bytes of a piece that has arrived. Raises StorageError."""
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
        while data:  # An unbuffered write may be partial when the disk is nearly full.
            data = data[file.write(data) :]

    def _at(self, part: FileSlice) -> io.FileIO:
        """Open the file of `part` at the part's offset, and return it. Only one file is open at a time, because a
        torrent may contain thousands of files.
        """
        if self._open is None or self._open[0] != part.path:
            self.close()
            self._open = part.path, io.FileIO(self.directory / part.path, "r+")
        file = self._open[1]
        file.seek(part.offset)
        return file


class ArrivingFile:
    """The first file of `pieces`, for a thread that reads the file in order while it arrives. `read` waits for missing
    bytes.
    """

    def __init__(self, pieces: PieceFile) -> None:
        path, self._left_bytes = pieces.layout.files[0]
        self._path = pieces.directory / path
        self._pieces = pieces
        self._read_bytes = 0
        self._file: BinaryIO | None = None

    def read(self, count: int, /) -> bytes:
        """Return the next `count` bytes, fewer at the file's end. Raises SwarmError (`GIVEN_UP`) and StorageError."""
        count = min(count, self._left_bytes)
        self._pieces.await_bytes(self._read_bytes + count)
        with on_disk(self._pieces.directory):
            if self._file is None:
                self._file = self._path.open("rb")
            data = self._file.read(count)
        self._left_bytes -= count
        self._read_bytes += count
        return data

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
