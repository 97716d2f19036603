"""A directory as one payload, and back.

Tensors of a safetensors file are coded against the parent's of the same name, dtype and shape, or against zeros where
it has none. All else (the safetensors header, other files) is compressed with what the parent has at the same place as
dictionary.

Payload: magic, length of the index, index (JSON), then frames in the index's order. How much each of them holds follows
from the index, from the headers and from the parent.
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
from echo_shared.errors import CodecError
from echo_shared.files import Readable, disk_errors
from echo_shared.tensors import Layout, read_layout

MAGIC: Final = b"EchoDlt1"
MAX_FILES: Final = 256
MAX_INDEX_BYTES: Final = 256 * MAX_FILES
MAX_HEADER_BYTES: Final = 8 << 20
"""A safetensors file with a larger header is coded like any other file."""
_CANNOT: Final = "A policy version cannot be read or written."


class _Entry(BaseModel):
    """One file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
    size_bytes: Annotated[int, Field(ge=0, le=1 << 62)]
    header_bytes: Annotated[int, Field(ge=0, le=MAX_HEADER_BYTES)]
    """Of a safetensors file, whose tensors follow; 0 of any other file."""


class _Index(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    delta: bool
    files: Annotated[tuple[_Entry, ...], Field(max_length=MAX_FILES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A file that is there, or nothing. `layout`: its tensors, if they are coded as such."""

    content: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    layout: Layout | None = None


class _Output:
    """A file that is written, and hashed, from its beginning to its end. Use `_Output.open`."""

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
        """The SHA-256 of what has been written, hexadecimal."""
        return self._hash.hexdigest()


def encode(directory: Path, payload: Path, *, parent: Path | None = None) -> None:
    """Writes all files in `directory` as one `payload`: a delta against the directory `parent`, or a keyframe.

    Raises CodecError for a directory with subdirectories, links or names that are not plain, and for a parent that is
    not there; StorageError.
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
    """Writes the files of `payload` into `directory`, which is made if it is not there. Reads it in order, to its end.
    Returns the SHA-256 of each (hexadecimal): hashed as they are written, they are not read again for it.

    `files`: the name and size in bytes of every file that it must hold. A delta needs the `parent` it was made against;
    a keyframe looks at none. What fails may leave unfinished files. Raises CodecError for a payload that is damaged,
    does not fit `parent` or holds other files; StorageError.
    """
    with disk_errors(_CANNOT, directory):
        reader = FrameReader(payload)
        index = _read_index(payload, reader)
        found = {entry.name: entry.size_bytes for entry in index.files}
        if found != dict(files):
            raise damaged(f"other files than were announced: {', '.join(sorted(found)) or 'none'}")
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
        raise CodecError("A delta is of no use without the version it is made against.", got=str(parent))
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
        raise damaged("other first bytes")
    try:
        index = _Index.model_validate_json(reader.plain(MAX_INDEX_BYTES))
    except ValidationError as error:
        raise damaged(_first(error)) from error
    if len({entry.name.lower() for entry in index.files}) < len(index.files):
        raise damaged("two files of one name")
    if any(entry.header_bytes > entry.size_bytes for entry in index.files):
        raise damaged("a header larger than its file")
    return index


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _stored_file(path: Path) -> _Stored:
    if path.is_symlink() or not path.is_file():
        raise CodecError("A policy version may hold plain files only.", got=str(path))
    if not path.stat().st_size:
        return _Stored()
    content = np.memmap(path, dtype=np.uint8, mode="r")
    layout = _layout(content, file_bytes=content.size, name=path.name) if path.suffix == ".safetensors" else None
    return _Stored(content=content, layout=layout)


def _parents_file(parent: Path | None, name: str) -> _Stored:
    return _stored_file(parent / name) if parent and (parent / name).exists() else _Stored()


def _layout(content: NDArray[np.uint8], *, file_bytes: int, name: str) -> Layout | None:
    """The layout of a file that is its header and then its tensors, one after the other; None of any other file."""
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
            # A copy, for the file aligns nothing.
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
            raise damaged(f"a header of {entry.name} that does not fit")
        for chunk in _chunks(layout, parent.layout):
            output.write(decode_array(chunk.compared_with(parent), chunk.dtype, reader).data)


def _parts(size_bytes: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, size_bytes, MAX_CONTENT_BYTES):
        yield begin, min(begin + MAX_CONTENT_BYTES, size_bytes)


@dataclass(slots=True, kw_only=True)
class _Chunk:
    """Bytes begin .. end of a file, all of one dtype.

    Large enough for the code tables not to count, small enough for all that is made of it to stay in a cache.
    """

    dtype: str
    begin: int
    end: int
    pieces: list[tuple[int, int | None]]
    """How many bytes, and where the parent's file has what they are compared with, if it has."""

    def compared_with(self, parent: _Stored) -> Patterns:
        """The parent's bit patterns [N] where it has them, else zeros [N]."""
        patterns = np.zeros(self.end - self.begin, np.uint8)
        at = 0
        for size, place in self.pieces:
            if place is not None:
                patterns[at : at + size] = parent.content[place : place + size]
            at += size
        return patterns.view(PATTERNS[self.dtype])


def _chunks(layout: Layout, parent: Layout | None) -> Iterator[_Chunk]:
    """The file's tensors in their order, cut and joined to chunks of MAX_CONTENT_BYTES at most."""
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
