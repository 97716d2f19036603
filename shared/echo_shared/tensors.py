"""Safetensors files as numpy arrays, bfloat16 included, without torch.

Files come from strangers: every offset is checked against the file's size before anything is read. Arrays are views of
a memory map where the dtype allows it, so that a model larger than memory can be walked tensor by tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_shared.errors import CodecError

MAX_HEADER_BYTES: Final = 100_000_000
"""The safetensors format's own limit."""

_STORED: Final[dict[str, np.dtype[Any]]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class TensorFile(Mapping[str, NDArray[np.float32]]):
    """The tensors of one file by name, as float32. Raises CodecError when the file is not valid safetensors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes: NDArray[np.uint8] = (
            np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
        )
        if self._bytes.size < 8:
            raise self._broken(f"{self._bytes.size} bytes")
        header_bytes = int(self._bytes[:8].view("<u8")[0])
        if header_bytes > min(MAX_HEADER_BYTES, self._bytes.size - 8):
            raise self._broken(f"a header of {header_bytes} bytes")
        try:
            header = json.loads(self._bytes[8 : 8 + header_bytes].tobytes())
        except (ValueError, RecursionError) as error:
            raise self._broken("a header that is not JSON") from error
        if not isinstance(header, dict):
            raise self._broken("a header that is not a map")
        header.pop("__metadata__", None)
        self._data = self._bytes[8 + header_bytes :]
        self._entries = {name: self._entry(name, entry) for name, entry in header.items()}

    def _broken(self, got: str) -> CodecError:
        return CodecError("A file is not valid safetensors.", got=f"{self._path.name}: {got}")

    def _entry(self, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
        try:
            dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
            sizes_fit = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and begin <= end <= self._data.size
        except (KeyError, TypeError, ValueError) as error:
            raise self._broken(f"no dtype, shape or offsets for {name}") from error
        if dtype not in _STORED:
            raise CodecError(
                "A tensor has a dtype that is not supported.",
                got=f"{name}: {dtype}",
                do=f"Save it as one of {', '.join(_STORED)}.",
            )
        if not sizes_fit or end - begin != math.prod(shape) * _STORED[dtype].itemsize:
            raise self._broken(f"wrong offsets for {name}")
        return dtype, shape, begin, end

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        dtype, shape, begin, end = self._entries[name]
        # The header's length decides the alignment, and numpy views need none of it when made from a buffer.
        stored: NDArray[Any] = np.frombuffer(self._data[begin:end].data, dtype=_STORED[dtype])
        if dtype == "BF16":
            stored = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        array: NDArray[np.float32] = stored.astype(np.float32, copy=False).reshape(shape)
        return array

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, without reading it."""
        return self._entries[name][1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
