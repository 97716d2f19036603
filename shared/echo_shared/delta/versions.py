"""Encodes a policy version's directory as one payload, and decodes it.

Each tensor of a safetensors file is encoded against the parent's tensor of the same name, dtype and shape, or against
zeros if the parent has none. All other bytes (safetensors headers, other files) are compressed with the parent's bytes
at the same offset as the zstd dictionary.

Payload: magic, length of the index, index (JSON), then frames in the index's order. The size of each frame's content
follows from the index, the headers and the parent.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo_shared.delta.arrays import PATTERNS, Patterns, decode_array, encode_array
from echo_shared.delta.frames import MAX_CONTENT_BYTES, FrameReader, FrameWriter, damaged
from echo_shared.delta.tensors import TensorLayout, read_layout
from echo_shared.errors import CodecError
from echo_shared.files.atomic import Readable, disk_errors

MAGIC: Final = b"EchoDlt1"
MAX_FILES: Final = 256
MAX_INDEX_BYTES: Final = 256 * MAX_FILES
MAX_HEADER_BYTES: Final = 8 << 20
"""Maximum bytes of the header of a safetensors file whose tensors are encoded one by one. A file with a larger header
is compressed as plain bytes.
"""
_CANNOT: Final = "A policy version cannot be read or written."


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
    size_bytes: Annotated[int, Field(ge=0, le=1 << 62)]
    header_bytes: Annotated[int, Field(ge=0, le=MAX_HEADER_BYTES)]
    """Bytes of the header of a safetensors file with tensors; 0 for any other file."""


class _Index(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    delta: bool
    files: Annotated[tuple[_Entry, ...], Field(max_length=MAX_FILES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """Content of one file of a version; empty if the version lacks the file. `layout` is set if the file's tensors are
    encoded one by one.
    """

    content: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    layout: TensorLayout | None = None


class _Output:
    """An output file that computes its SHA-256 while it is written. Create it with `_Output.open`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[_Output]:
        with path.open("wb") as file:
            yield cls(file)

    def write(self, data: memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def encode(directory: Path, payload: Path, *, parent: Path | None = None) -> None:
    """Write all files in `directory` to one `payload`: a delta against the directory `parent`, or a keyframe if
    `parent` is None.

    Raises CodecError for subdirectories, links, file names that are not plain and a missing parent; StorageError for
    disk errors.
    """
    temporary = payload.with_name(f"{payload.name}.{os.getpid()}.tmp")
    with disk_errors(_CANNOT, payload.parent):
        parent = None if parent is None else _existing(parent)
        files = {path.name: _stored_file(path) for path in sorted(directory.iterdir())}
        index = _index_of(files, delta=parent is not None)
        try:
            with temporary.open("wb") as stream:
                stream.write(MAGIC)
                writer = FrameWriter(stream)
                writer.plain(index.model_dump_json().encode())
                for name, file in files.items():
                    _encode_file(file, _parents_file(parent, name), writer)
            temporary.replace(payload)
        finally:
            temporary.unlink(missing_ok=True)


def decode(
    payload: Readable, directory: Path, *, files: Mapping[str, int], parent: Path | None = None
) -> Mapping[str, str]:
    """Write the files of `payload` into `directory`, and return each file's SHA-256 (hexadecimal) by name.

    `files` gives the name and size in bytes of every expected file. A delta needs the `parent` that it was encoded
    against; a keyframe ignores `parent`. After an error, unfinished files may remain.

    Raises CodecError for a payload that is damaged, does not fit `parent` or holds other files; StorageError for disk
    errors.
    """
    with disk_errors(_CANNOT, directory):
        reader = FrameReader(payload)
        index = _read_index(payload, reader)
        found = {entry.name: entry.size_bytes for entry in index.files}
        if found != dict(files):
            raise damaged(f"it holds other files than announced: {', '.join(sorted(found)) or 'none'}")
        parent = _existing(parent) if index.delta else None
        directory.mkdir(parents=True, exist_ok=True)
        hashes = {}
        for entry in index.files:
            with _Output.open(directory / entry.name) as output:
                _decode_file(entry, _parents_file(parent, entry.name), reader, output)
            hashes[entry.name] = output.sha256
        reader.expect_end()
    return hashes


def _existing(parent: Path | None) -> Path:
    if parent is None or not parent.is_dir():
        raise CodecError("A delta cannot be used without its parent version.", got=str(parent))
    return parent


def _index_of(files: dict[str, _Stored], *, delta: bool) -> _Index:
    try:
        entries = [
            _Entry(name=name, size_bytes=file.content.size, header_bytes=file.layout.header_bytes if file.layout else 0)
            for name, file in files.items()
        ]
        return _Index(delta=delta, files=tuple(entries))
    except ValidationError as error:
        raise CodecError("These files cannot be sent as a policy version.", got=_first(error)) from error


def _read_index(stream: Readable, reader: FrameReader) -> _Index:
    if stream.read(len(MAGIC)) != MAGIC:
        raise damaged("its first bytes are wrong")
    try:
        index = _Index.model_validate_json(reader.plain(MAX_INDEX_BYTES))
    except ValidationError as error:
        raise damaged(_first(error)) from error
    if len({entry.name.lower() for entry in index.files}) < len(index.files):
        raise damaged("two files have the same name")
    if any(entry.header_bytes > entry.size_bytes for entry in index.files):
        raise damaged("a header is larger than its file")
    return index


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _stored_file(path: Path) -> _Stored:
    if path.is_symlink() or not path.is_file():
        raise CodecError("A policy version may only hold plain files.", got=str(path))
    if not path.stat().st_size:
        return _Stored()
    content = np.memmap(path, dtype=np.uint8, mode="r")
    layout = _layout(content, file_bytes=content.size, name=path.name) if path.suffix == ".safetensors" else None
    return _Stored(content=content, layout=layout)


def _parents_file(parent: Path | None, name: str) -> _Stored:
    return _stored_file(parent / name) if parent and (parent / name).exists() else _Stored()


def _layout(content: NDArray[np.uint8], *, file_bytes: int, name: str) -> TensorLayout | None:
    """Return the tensor layout of a safetensors file without gaps between its tensors; None for any other file."""
    try:
        layout = read_layout(content, file_bytes=file_bytes, name=name)
    except CodecError:
        return None
    end = layout.header_bytes
    for tensor in sorted(layout.tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != end:
            return None
        end = tensor.end
    return layout if end == file_bytes and layout.header_bytes <= MAX_HEADER_BYTES else None


def _encode_file(file: _Stored, parent: _Stored, writer: FrameWriter) -> None:
    for begin, end in _parts(file.layout.header_bytes if file.layout else file.content.size):
        writer.frame(file.content[begin:end], dictionary=parent.content[begin:end].tobytes())
    if file.layout:
        for chunk in _chunks(file.layout, parent.layout):
            # Copy the chunk: in the memory-mapped file it may be unaligned.
            new = np.array(file.content[chunk.begin : chunk.end]).view(PATTERNS[chunk.dtype])
            encode_array(new, chunk.compared_with(parent), chunk.dtype, writer)


def _decode_file(entry: _Entry, parent: _Stored, reader: FrameReader, output: _Output) -> None:
    header = bytearray()
    for begin, end in _parts(entry.header_bytes or entry.size_bytes):
        content = reader.frame(end - begin, dictionary=parent.content[begin:end].tobytes())
        output.write(content.data)
        if entry.header_bytes:
            header += content.tobytes()
    if entry.header_bytes:
        layout = _layout(np.frombuffer(header, np.uint8), file_bytes=entry.size_bytes, name=entry.name)
        if layout is None or layout.header_bytes != entry.header_bytes:
            raise damaged(f"the header of {entry.name} does not fit")
        for chunk in _chunks(layout, parent.layout):
            output.write(decode_array(chunk.compared_with(parent), chunk.dtype, reader).data)


def _parts(size_bytes: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, size_bytes, MAX_CONTENT_BYTES):
        yield begin, min(begin + MAX_CONTENT_BYTES, size_bytes)


@dataclass(slots=True, kw_only=True)
class _Chunk:
    """Part of a file, bytes `begin` to `end` (exclusive), with one dtype.

    A chunk is large enough to amortize the code tables and small enough to stay in the CPU cache.
    """

    dtype: str
    begin: int
    end: int
    pieces: list[tuple[int, int | None]]
    """(size in bytes, offset in the parent's file of the bytes to compare with). An offset of None means: compare with
    zeros.
    """

    def compared_with(self, parent: _Stored) -> Patterns:
        """Return the bit patterns [N] with which the chunk is compared: those of the parent version, zeros where it has
        no such tensor.
        """
        patterns = np.zeros(self.end - self.begin, np.uint8)
        at = 0
        for size, place in self.pieces:
            if place is not None:
                patterns[at : at + size] = parent.content[place : place + size]
            at += size
        return patterns.view(PATTERNS[self.dtype])


def _chunks(layout: TensorLayout, parent: TensorLayout | None) -> Iterator[_Chunk]:
    """Yield the file's tensors in file order, split and merged into chunks of at most MAX_CONTENT_BYTES."""
    chunk: _Chunk | None = None
    for name, tensor in sorted(layout.tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        old = parent.tensors.get(name) if parent else None
        place = old.begin if old and (old.dtype, old.shape) == (tensor.dtype, tensor.shape) else None
        begin = tensor.begin
        while begin < tensor.end:
            if chunk and (chunk.dtype != tensor.dtype or chunk.end - chunk.begin == MAX_CONTENT_BYTES):
                yield chunk
                chunk = None
            chunk = chunk or _Chunk(dtype=tensor.dtype, begin=begin, end=begin, pieces=[])
            size = min(tensor.end - begin, MAX_CONTENT_BYTES - (chunk.end - chunk.begin))
            chunk.pieces.append((size, None if place is None else place + begin - tensor.begin))
            begin += size
            chunk.end += size
    if chunk:
        yield chunk
