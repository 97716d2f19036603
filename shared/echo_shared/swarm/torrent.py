"""Torrents (version 1, private): built from a directory, and parsed into a layout of files and pieces.

Equal directories give equal torrents, so an artefact that is published again keeps its info-hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from echo_shared.errors import CodecError, SwarmError
from echo_shared.files.atomic import disk_errors
from echo_shared.files.file_names import is_portable_name
from echo_shared.swarm import bencode

BLOCK_BYTES: Final = 16 * 1024
"""Bytes that BitTorrent clients request at a time."""
_USUAL_PIECE_BYTES: Final = 64 * 1024
_FEWEST_PIECES: Final = 128
"""Minimum number of pieces of a small payload, whose pieces are made smaller (down to BLOCK_BYTES) to reach it.

During the first and last few pieces of a broadcast, not all nodes can transfer in parallel; smaller pieces shorten that
time. Still more pieces gain nothing and cost each node processor time.
"""
_MOST_PIECES: Final = 32_768
"""Maximum number of pieces. It keeps the torrent of a large model well below the size limit of a message."""
_HASH_BYTES: Final = 20
_MOST_PIECE_BYTES: Final = 2**26


def _check_part(name: str) -> str:
    if name.startswith(".") or not is_portable_name(name):
        raise ValueError("this name is hidden or not portable between operating systems")
    return name


PathPart = Annotated[str, AfterValidator(_check_part)]
"""One path component. Hidden names, and names that could leave the directory on any system, are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Torrent:
    """A torrent file's bytes, and its info-hash."""

    torrent: bytes
    info_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSlice:
    """`length` bytes from `offset` of the file `path`, a path below the artefact's directory."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TorrentLayout:
    """Contents of a torrent: the artefact's directory `name`, its files in order, and the hash of each piece."""

    info_hash: bytes
    torrent: bytes
    """Torrent encoded from the info dictionary only, so that web seeds, trackers and peers named by its sender are
    removed.
    """
    name: str
    files: tuple[tuple[str, int], ...]
    """(path below the artefact's directory, size in bytes) of each file."""
    piece_bytes: int
    piece_hashes: tuple[bytes, ...]
    total_bytes: int

    def size_of_piece(self, piece: int) -> int:
        return min(self.piece_bytes, self.total_bytes - piece * self.piece_bytes)

    def size_of_block(self, piece: int, block: int) -> int:
        return min(BLOCK_BYTES, self.size_of_piece(piece) - block * BLOCK_BYTES)

    def fits(self, directory: Path) -> bool:
        """Return True if `directory` has the torrent's name and all its files in full size. File contents
        are not read.
        """
        return directory.name == self.name and all(
            (directory / path).is_file() and (directory / path).stat().st_size == size for path, size in self.files
        )

    def slices(self, first_piece: int, end_piece: int) -> Iterator[FileSlice]:
        """Yield the parts of files that hold the pieces from `first_piece` up to `end_piece` (exclusive), in order."""
        start, end = first_piece * self.piece_bytes, min(end_piece * self.piece_bytes, self.total_bytes)
        file_start = 0
        for path, size in self.files:
            low, high = max(start, file_start), min(end, file_start + size)
            if low < high:
                yield FileSlice(path=path, offset=low - file_start, length=high - low)
            file_start += size


class _File(BaseModel):
    """One file of the torrent. Other keys are refused, because some clients obey them: keys for another path, or a
    link.
    """

    model_config = ConfigDict(extra="forbid")

    length: Annotated[int, Field(ge=0)]
    path: Annotated[tuple[PathPart, ...], Field(min_length=1)]


class _Info(BaseModel):
    """Info dictionary. Other keys are refused, because some clients obey them: keys for another name, a single file, or
    version 2.
    """

    model_config = ConfigDict(extra="forbid")

    files: Annotated[tuple[_File, ...], Field(min_length=1)]
    name: PathPart
    piece_length: Annotated[int, Field(ge=BLOCK_BYTES, le=_MOST_PIECE_BYTES, alias="piece length")]
    pieces: Annotated[bytes, Field(min_length=_HASH_BYTES)]
    private: Literal[1]


def make_torrent(directory: Path) -> Torrent:
    """Build the torrent of every file below `directory`, named after it. Blocks while it reads and hashes the files.

    Raises SwarmError for an empty directory, CodecError for a name that is not portable, StorageError for disk errors.
    """
    paths = sorted((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.relative_to(directory).parts)
    sizes = [path.stat().st_size for path in paths]
    if not sum(sizes):
        raise SwarmError("An artefact without any bytes cannot be published.", got=str(directory))
    piece_bytes = piece_bytes_for(sum(sizes))
    with disk_errors("A file to publish cannot be read.", directory):
        pieces = b"".join(_hash_pieces(paths, piece_bytes))
    info: dict[str, bencode.Encodable] = {
        "files": [
            {"length": size, "path": path.relative_to(directory).parts} for path, size in zip(paths, sizes, strict=True)
        ],
        "name": directory.name,
        "piece length": piece_bytes,
        "pieces": pieces,
        "private": 1,
    }
    torrent = bencode.encode({"info": info})
    return Torrent(torrent=torrent, info_hash=read_torrent(torrent).info_hash)


def read_torrent(torrent: bytes) -> TorrentLayout:
    """Parse `torrent` into its layout.

    Only the info dictionary is read, and it may only hold what `make_torrent` writes. Raises CodecError if it is
    malformed or if a path leaves the artefact's directory.
    """
    decoded = bencode.decode(torrent)
    raw_info: bencode.Value = decoded.get("info", b"") if isinstance(decoded, dict) else b""
    try:
        info = _Info.model_validate(raw_info)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise CodecError("A torrent is not valid.", got=f"{first['loc']}: {first['msg']}") from error
    total_bytes = sum(file.length for file in info.files)
    if len(info.pieces) != _HASH_BYTES * -(-total_bytes // info.piece_length):
        raise CodecError("A torrent is not valid.", got=f"{len(info.pieces)} bytes of hashes for {total_bytes} bytes")
    paths = tuple("/".join(file.path) for file in info.files)
    # libtorrent would rename one of two files whose paths differ only in case.
    if len({path.casefold() for path in paths}) != len(paths):
        raise CodecError("A torrent is not valid.", got="two files of the same name")
    return TorrentLayout(
        info_hash=piece_hash(bencode.encode(raw_info)),
        torrent=bencode.encode({"info": raw_info}),
        name=info.name,
        files=tuple((path, file.length) for path, file in zip(paths, info.files, strict=True)),
        piece_bytes=info.piece_length,
        piece_hashes=tuple(info.pieces[i : i + _HASH_BYTES] for i in range(0, len(info.pieces), _HASH_BYTES)),
        total_bytes=total_bytes,
    )


def piece_hash(data: bytes) -> bytes:
    """Return the SHA-1 of a piece, as BitTorrent requires; 20 bytes."""
    return hashlib.sha1(data, usedforsecurity=False).digest()


def piece_bytes_for(total_bytes: int) -> int:
    """Return the piece size in bytes for a payload of `total_bytes`."""
    piece_bytes = _USUAL_PIECE_BYTES
    while piece_bytes > BLOCK_BYTES and total_bytes < _FEWEST_PIECES * piece_bytes:
        piece_bytes //= 2
    while total_bytes > _MOST_PIECES * piece_bytes:
        piece_bytes *= 2
    return piece_bytes


def _hash_pieces(paths: list[Path], piece_bytes: int) -> Iterator[bytes]:
    piece, room = hashlib.sha1(usedforsecurity=False), piece_bytes
    for path in paths:
        with path.open("rb") as file:
            while data := file.read(room):
                piece.update(data)
                room -= len(data)
                if room == 0:
                    yield piece.digest()
                    piece, room = hashlib.sha1(usedforsecurity=False), piece_bytes
    if room < piece_bytes:
        yield piece.digest()
