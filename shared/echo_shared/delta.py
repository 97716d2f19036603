"""Policy versions as one file: a directory of adapter files, whole (a keyframe) or against an earlier version's (a delta).

Lossless: every file comes back byte for byte. The caller checks the result against the signed manifest all the same,
for a delta that is applied to another parent than it was made for may decode into something else.

Tensors of a safetensors file are coded as differences to the parent's tensors of the same name, dtype and shape, or to
zeros where it has none. Bit patterns are mapped to integers of the same order, subtracted with wraparound, and the
differences zigzag-mapped, so that a small step of either sign is a small number. Against zeros that leaves the
exponent in one byte and the sign below the mantissa: a keyframe needs no code of its own.

Adam's steps are all of about the same size, so what they come to in units in the last place follows from the exponent
of the parent's value, which the receiver knows. Differences are grouped by it before they are entropy-coded: bytes of
a bfloat16 delta over those of the raw adapter, one step at a learning rate of 1e-5, 0.20 so and 0.24 without (a model
of 512 x 4); 0.16 and 0.22 (the built-in one). Where nearly all differences are tiny, several share a byte: Huffman
codes, which are all of zstd's that counts here, spend a bit on each symbol at least.

All else (the safetensors header, other files) is compressed with the parent's bytes at the same place as dictionary.

Payload: magic, length of the index, index (JSON), then frames in the index's order, each a length and a zstd frame.
What a frame decodes to, and how much that is, follows from what came before it: nothing is allocated on its word.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Final, TypeVar

import numpy as np
import zstandard
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo_shared.errors import CodecError, LocalProtocolError, StorageError
from echo_shared.tensors import Layout, read_layout

MAGIC: Final = b"EchoDlt1"
LEVEL: Final = 1
"""zstd's. Levels 3 and 9 are slower and gain nothing on grouped differences."""
CHUNK_BYTES: Final = 2 << 20
"""Coded at a time: small enough to stay in a processor's cache, large enough for the groups' code tables not to count."""
MAX_HEADER_BYTES: Final = 8 << 20
"""A safetensors file with a larger header is coded like any other file."""
MAX_INDEX_BYTES: Final = 1 << 16
MIN_GROUP: Final = 1024
"""Elements; smaller groups join the next, for each pays for its own code tables."""
MAX_ESCAPED: Final = 0.02
"""The share of a group's differences that may be too large for a packed symbol."""

_LENGTH: Final = struct.Struct("<I")
_FORMATS: Final[dict[str, tuple[np.dtype[Any], np.dtype[Any], int]]] = {
    "F32": (np.dtype("<u4"), np.dtype("<i4"), 23),
    "F16": (np.dtype("<u2"), np.dtype("<i2"), 10),
    "BF16": (np.dtype("<u2"), np.dtype("<i2"), 7),
}
"""Bit patterns without and with sign, and how many of the bits are mantissa."""

Bytes = NDArray[np.uint8]
Ints = NDArray[Any]
T = TypeVar("T")


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
    size_bytes: Annotated[int, Field(ge=0)]
    header_bytes: Annotated[int, Field(ge=0, le=MAX_HEADER_BYTES)]
    """The header of a safetensors file, whose tensors follow; 0 of any other file."""


class _Index(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    delta: bool
    files: Annotated[tuple[_File, ...], Field(max_length=256)]


def encode(directory: Path, payload: Path, *, parent: Path | None = None) -> None:
    """Writes all files in `directory` as one `payload`: a delta against the directory `parent`, or a keyframe.

    Raises CodecError for a directory with subdirectories, links or names that are not plain; StorageError.
    """
    temporary = payload.with_name(f"{payload.name}.{os.getpid()}.tmp")
    with _storage_errors(payload):
        sources = [_Source.of_file(path) for path in sorted(directory.iterdir())]
        index = _checked(lambda: _Index(delta=parent is not None, files=tuple(source.file for source in sources)))
        encoded = index.model_dump_json().encode()
        if len(encoded) > MAX_INDEX_BYTES:
            raise _broken(f"an index of {len(encoded)} bytes")
        try:
            with temporary.open("wb") as stream:
                stream.write(MAGIC + _LENGTH.pack(len(encoded)) + encoded)
                for source in sources:
                    _encode_file(source, _Parent.of(source.file.name, parent), _Writer(stream))
            temporary.replace(payload)
        finally:
            temporary.unlink(missing_ok=True)


def decode(payload: Path, directory: Path, *, parent: Path | None = None, max_bytes: int) -> None:
    """Writes the files of `payload` into `directory`, which is made if it is not there.

    A delta needs the `parent` it was made against; a keyframe does without. When it fails, files may be left
    unfinished. Raises CodecError for a payload that is damaged, does not fit `parent` or holds more than `max_bytes`;
    StorageError.
    """
    with _storage_errors(directory), payload.open("rb") as stream:
        reader = _Reader(stream, payload.stat().st_size)
        index = _read_index(reader)
        total = sum(file.size_bytes for file in index.files)
        if total > max_bytes:
            raise _broken(f"{total} bytes of files, {max_bytes} allowed")
        if len({file.name.lower() for file in index.files}) < len(index.files):
            raise _broken("two files of one name")
        if index.delta and (parent is None or not parent.is_dir()):
            raise CodecError("A delta cannot be decoded without the version it was made against.", got=f"{parent}")
        directory.mkdir(parents=True, exist_ok=True)
        for file in index.files:
            with (directory / file.name).open("wb") as output:
                _decode_file(file, _Parent.of(file.name, parent if index.delta else None), reader, output)
        if reader.left:
            raise _broken(f"{reader.left} bytes after its end")


@contextmanager
def _storage_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            "A policy version cannot be read or written.",
            got=f"{error.filename or place}: {error.strerror}",
            do="Free some disk space, or mend what the system says.",
        ) from error


def _broken(got: str) -> CodecError:
    return CodecError("A policy version's payload is damaged, or made against another parent.", got=got)


def _checked(make: Callable[[], T]) -> T:
    try:
        return make()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _broken(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


# --- Frames ---------------------------------------------------------------------------------------------------------


class _Writer:
    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)

    def number(self, value: int) -> None:
        self._stream.write(bytes([value]))

    def frame(self, content: Bytes, dictionary: bytes = b"") -> None:
        compressor = self._compressor
        if dictionary:
            compressor = zstandard.ZstdCompressor(level=LEVEL, dict_data=_dictionary(dictionary))
        frame = compressor.compress(np.ascontiguousarray(content).data)
        self._stream.write(_LENGTH.pack(len(frame)) + frame)


class _Reader:
    def __init__(self, stream: IO[bytes], size_bytes: int) -> None:
        self._stream = stream
        self.left = size_bytes
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=2 * CHUNK_BYTES)

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise _broken("it ends too early")
        self.left -= count
        return self._stream.read(count)

    def number(self) -> int:
        return self.take(1)[0]

    def length(self, limit: int) -> int:
        length: int = _LENGTH.unpack(self.take(_LENGTH.size))[0]
        if length > limit:
            raise _broken(f"a part of {length} bytes where {limit} are the most")
        return length

    def frame(self, content_bytes: int, dictionary: bytes = b"") -> Bytes:
        """The content of the next frame, of exactly `content_bytes`."""
        frame = self.take(self.length(content_bytes + content_bytes // 128 + 128))
        decompressor = self._decompressor
        if dictionary:
            decompressor = zstandard.ZstdDecompressor(dict_data=_dictionary(dictionary))
        try:
            if zstandard.frame_content_size(frame) != content_bytes:
                raise _broken(f"a part that is not of {content_bytes} bytes")
            content = decompressor.decompress(frame, max_output_size=content_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise _broken(str(error)) from error
        if len(content) != content_bytes:
            raise _broken(f"a part of {len(content)} bytes, {content_bytes} expected")
        return np.frombuffer(content, np.uint8)


def _dictionary(content: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _read_index(reader: _Reader) -> _Index:
    if reader.take(len(MAGIC)) != MAGIC:
        raise _broken("other first bytes")
    encoded = reader.take(reader.length(MAX_INDEX_BYTES))
    return _checked(lambda: _Index.model_validate_json(encoded))


# --- Files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A file to encode. `layout`: its tensors, if they are coded as such."""

    file: _File
    content: Bytes
    layout: Layout | None

    @classmethod
    def of_file(cls, path: Path) -> _Source:
        if path.is_symlink() or not path.is_file():
            raise CodecError("A policy version may hold files only.", got=str(path))
        content = _mapped(path)
        layout = None
        if path.suffix == ".safetensors":
            layout = _whole_layout(content, file_bytes=content.size, name=path.name)
        header_bytes = layout.header_bytes if layout else 0
        file = _checked(lambda: _File(name=path.name, size_bytes=content.size, header_bytes=header_bytes))
        return cls(file=file, content=content, layout=layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parent:
    """The parent's file of the same name; without content or tensors where there is none."""

    content: Bytes
    layout: Layout

    @classmethod
    def of(cls, name: str, directory: Path | None) -> _Parent:
        path = directory / name if directory else None
        content = _mapped(path) if path and path.is_file() else np.empty(0, np.uint8)
        layout = None
        if name.endswith(".safetensors"):
            layout = _whole_layout(content, file_bytes=content.size, name=name)
        return cls(content=content, layout=layout or Layout(header_bytes=0, tensors={}))


def _mapped(path: Path) -> Bytes:
    return np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)


def _whole_layout(content: Bytes, *, file_bytes: int, name: str) -> Layout | None:
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


def _encode_file(source: _Source, parent: _Parent, writer: _Writer) -> None:
    plain_bytes = source.layout.header_bytes if source.layout else source.content.size
    for begin in range(0, plain_bytes, CHUNK_BYTES):
        end = min(begin + CHUNK_BYTES, plain_bytes)
        writer.frame(source.content[begin:end], parent.content[begin:end].tobytes())
    if source.layout:
        for chunk in _chunks(source.layout, parent.layout):
            # A copy, for the file's own layout aligns nothing.
            new = np.array(source.content[chunk.begin : chunk.end]).view(_FORMATS[chunk.dtype][0])
            _encode_chunk(new, chunk.reference(parent), chunk.dtype, writer)


def _decode_file(file: _File, parent: _Parent, reader: _Reader, output: IO[bytes]) -> None:
    plain_bytes = file.header_bytes or file.size_bytes
    plain = bytearray()
    for begin in range(0, plain_bytes, CHUNK_BYTES):
        end = min(begin + CHUNK_BYTES, plain_bytes)
        content = reader.frame(end - begin, parent.content[begin:end].tobytes())
        output.write(content)
        if file.header_bytes:
            plain += content.tobytes()
    if file.header_bytes:
        layout = _whole_layout(np.frombuffer(plain, np.uint8), file_bytes=file.size_bytes, name=file.name)
        if layout is None or layout.header_bytes != file.header_bytes:
            raise _broken(f"{file.name}: a header that does not fit")
        for chunk in _chunks(layout, parent.layout):
            output.write(_decode_chunk(chunk.reference(parent), chunk.dtype, reader))


# --- Tensors --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Chunk:
    """Bytes begin .. end of a file, all of one dtype, and where the parent has what each piece of it is compared with."""

    dtype: str
    begin: int
    end: int
    pieces: list[tuple[int, int | None]]
    """Bytes, and the place in the parent's file, if there is one."""

    def reference(self, parent: _Parent) -> Ints:
        """Bit patterns to compare with: the parent's, or zeros."""
        reference = np.zeros(self.end - self.begin, np.uint8)
        at = 0
        for size, place in self.pieces:
            if place is not None:
                reference[at : at + size] = parent.content[place : place + size]
            at += size
        return reference.view(_FORMATS[self.dtype][0])


def _chunks(layout: Layout, parent: Layout) -> Iterator[_Chunk]:
    """The file's tensors in their order, cut and joined into chunks of CHUNK_BYTES at most."""
    chunk: _Chunk | None = None
    for name, tensor in sorted(layout.tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        old = parent.tensors.get(name)
        place = old.begin if old and (old.dtype, old.shape) == (tensor.dtype, tensor.shape) else None
        begin = tensor.begin
        while begin < tensor.end:
            if chunk and (chunk.dtype != tensor.dtype or chunk.end - chunk.begin == CHUNK_BYTES):
                yield chunk
                chunk = None
            chunk = chunk or _Chunk(dtype=tensor.dtype, begin=begin, end=begin, pieces=[])
            size = min(tensor.end - begin, CHUNK_BYTES - (chunk.end - chunk.begin))
            chunk.pieces.append((size, None if place is None else place + begin - tensor.begin))
            begin += size
            chunk.end += size
    if chunk:
        yield chunk


def _encode_chunk(new: Ints, old: Ints, dtype: str, writer: _Writer) -> None:
    unsigned, signed, mantissa_bits = _FORMATS[dtype]
    steps = _ordered(new.view(signed)) - _ordered(old.view(signed))
    zigzag = ((steps << 1) ^ (steps >> (8 * signed.itemsize - 1))).view(unsigned)
    for group in _groups(old, mantissa_bits):
        _encode_group(zigzag.take(group), writer)


def _decode_chunk(old: Ints, dtype: str, reader: _Reader) -> Bytes:
    unsigned, signed, mantissa_bits = _FORMATS[dtype]
    zigzag = np.empty(old.size, unsigned)
    for group in _groups(old, mantissa_bits):
        zigzag[group] = _decode_group(group.size, unsigned, reader)
    steps = (zigzag >> 1).view(signed) ^ -(zigzag & 1).view(signed)
    content: Bytes = _ordered(_ordered(old.view(signed)) + steps).view(np.uint8)
    return content


def _ordered(patterns: Ints) -> Ints:
    """Floats' bit patterns as integers of the same order, and back again: it is its own inverse."""
    bits = 8 * patterns.itemsize - 1
    return patterns ^ ((patterns >> bits) & patterns.dtype.type((1 << bits) - 1))


def _groups(old: Ints, mantissa_bits: int) -> Iterator[NDArray[np.intp]]:
    """Where the elements of each group are: those of one exponent in the parent, or of several rare ones."""
    exponents = ((old << 1) >> (mantissa_bits + 1)).astype(np.uint8)
    order = np.argsort(exponents, kind="stable")  # A radix sort, for keys of eight bits.
    begin = 0
    for end in np.searchsorted(exponents.take(order), np.arange(256), side="right").tolist():
        if end - begin >= MIN_GROUP or begin < end == old.size:
            yield order[begin:end]
            begin = end


def _encode_group(zigzag: Ints, writer: _Writer) -> None:
    for bits in (2, 4):
        escape = (1 << bits) - 1
        escaped = zigzag >= escape
        if np.count_nonzero(escaped) <= MAX_ESCAPED * zigzag.size:
            writer.number(bits)
            writer.frame(_packed(np.minimum(zigzag, escape).astype(np.uint8), bits))
            zigzag = zigzag[escaped] - zigzag.dtype.type(escape)
            break
    else:
        writer.number(8)
    if zigzag.size:
        for plane in zigzag.view(np.uint8).reshape(-1, zigzag.itemsize).T:
            writer.frame(plane)


def _decode_group(size: int, unsigned: np.dtype[Any], reader: _Reader) -> Ints:
    bits = reader.number()
    if bits == 8:
        return _read_planes(size, unsigned, reader)
    if bits not in (2, 4):
        raise _broken(f"symbols of {bits} bits")
    symbols = _unpacked(reader.frame(-(-size * bits // 8)), bits)[:size]
    zigzag = symbols.astype(unsigned)
    escaped = np.flatnonzero(symbols == (1 << bits) - 1)
    if escaped.size:
        zigzag[escaped] += _read_planes(escaped.size, unsigned, reader)
    return zigzag


def _read_planes(size: int, unsigned: np.dtype[Any], reader: _Reader) -> Ints:
    planes = np.empty((size, unsigned.itemsize), np.uint8)
    for number in range(unsigned.itemsize):
        planes[:, number] = reader.frame(size)
    return planes.view(unsigned)[:, 0]


def _packed(symbols: Bytes, bits: int) -> Bytes:
    a_byte = 8 // bits
    padded = np.zeros(-(-symbols.size // a_byte) * a_byte, np.uint8)
    padded[: symbols.size] = symbols
    packed = padded[0::a_byte].copy()
    for number in range(1, a_byte):
        packed |= padded[number::a_byte] << (number * bits)
    return packed


def _unpacked(packed: Bytes, bits: int) -> Bytes:
    symbols = np.empty((packed.size, 8 // bits), np.uint8)
    for number in range(8 // bits):
        np.bitwise_and(packed >> (number * bits), (1 << bits) - 1, out=symbols[:, number])
    return symbols.reshape(-1)
