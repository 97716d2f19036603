"""Reads safetensors files as numpy arrays, bfloat16 included, without torch.

Files are untrusted: every offset is checked against the file size before a read. Arrays are views of a memory map if
the dtype allows it, so a model larger than memory can be read tensor by tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_shared.errors import CodecError

MAX_HEADER_BYTES: Final = 100_000_000
"""Maximum bytes of a header: the limit of the safetensors format."""

_STORED: Final[dict[str, np.dtype[Any]]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Place of one tensor in its file: the bytes from `begin` up to `end` (exclusive)."""

    dtype: str
    """Name of the dtype in the safetensors format, such as BF16."""
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    header_bytes: int
    """Bytes of the header, including the length field before it."""
    tensors: dict[str, StoredTensor]


def read_layout(content: NDArray[np.uint8], *, file_bytes: int, name: str) -> TensorLayout:
    """Parse the header of a file of `file_bytes` bytes; `content` [N] is the file's start. Raises CodecError if it is
    invalid.
    """
    if content.size < 8:
        raise _broken(name, f"{content.size} bytes")
    header_bytes = 8 + int.from_bytes(content[:8].tobytes(), "little")
    if header_bytes > min(8 + MAX_HEADER_BYTES, content.size):
        raise _broken(name, f"a header of {header_bytes - 8} bytes")
    try:
        header = json.loads(content[8:header_bytes].tobytes())
    except (ValueError, RecursionError) as error:
        raise _broken(name, "a header that is not JSON") from error
    if not isinstance(header, dict):
        raise _broken(name, "a header that is not a map")
    header.pop("__metadata__", None)
    tensors = {key: _stored(name, key, entry, header_bytes, file_bytes) for key, entry in header.items()}
    return TensorLayout(header_bytes=header_bytes, tensors=tensors)


def _stored(file: str, name: str, entry: Any, header_bytes: int, file_bytes: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        sizes_fit = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and (
            begin <= end <= file_bytes - header_bytes
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(file, f"no dtype, shape or offsets for {name}") from error
    if dtype not in _STORED:
        raise CodecError(
            "A tensor has a dtype that is not supported.",
            got=f"{name}: {dtype}",
            do=f"Save it as one of {', '.join(_STORED)}.",
        )
    if not sizes_fit or end - begin != math.prod(shape) * _STORED[dtype].itemsize:
        raise _broken(file, f"wrong offsets for {name}")
    return StoredTensor(dtype=dtype, shape=shape, begin=header_bytes + begin, end=header_bytes + end)


def _broken(file: str, got: str) -> CodecError:
    return CodecError("A file is not valid safetensors.", got=f"{file}: {got}")


class TensorFile(Mapping[str, NDArray[np.float32]]):
    """The tensors of one file by name, as float32. Raises CodecError when the file is not valid safetensors."""

    def __init__(self, path: Path) -> None:
        self._bytes: NDArray[np.uint8] = (
            np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
        )
        self._tensors = read_layout(self._bytes, file_bytes=self._bytes.size, name=path.name).tensors

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        tensor = self._tensors[name]
        # np.frombuffer accepts any alignment; the header's length may leave the tensors unaligned.
        stored: NDArray[Any] = np.frombuffer(self._bytes[tensor.begin : tensor.end].data, dtype=_STORED[tensor.dtype])
        if tensor.dtype == "BF16":
            stored = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        array: NDArray[np.float32] = stored.astype(np.float32, copy=False).reshape(tensor.shape)
        return array

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape without reading its data."""
        return self._tensors[name].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
