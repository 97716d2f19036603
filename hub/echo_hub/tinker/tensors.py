"""Read the message Tensor: dense bytes, or a sparse matrix in compressed rows (CSR).

Letters: N rows, K columns, M listed cells of a sparse matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tinker.protobuf import LENGTH, Value, fields, malformed, number_of, unknown_field, view_of

MOST_DENSE_BYTES: Final = 64 * 2**20
"""Maximum number of bytes that all sparse tensors of one request may take as dense arrays."""
MOST_COLUMNS: Final = 4_096
_DTYPES: Final = {1: "<f4", 2: "<i8", 3: "<i4", 4: "<u2"}
"""NumPy types of the DType enum. bfloat16 (4) is read as its 16 bits."""
_BFLOAT16: Final = 4
_SHAPE: Final = (4,)
"""Number of the protobuf field that holds the tensor's dimensions."""


@dataclass(slots=True)
class DenseRoom:
    """Bytes that sparse tensors of one request may still take as dense arrays."""

    left: int = MOST_DENSE_BYTES

    def take(self, num_bytes: int, where: str) -> None:
        self.left -= num_bytes
        if self.left < 0:
            raise Refusal(
                RefusalKind.TOO_LARGE,
                f"The sparse tensors of this request are too large: {where} is the first that does not fit.",
                got=f"more than {MOST_DENSE_BYTES} bytes as dense tensors",
                do="Send fewer data in one request, or fewer columns.",
                param=where,
            )


def read_tensor(message: memoryview, where: str, room: DenseRoom) -> NDArray[np.float32] | NDArray[np.int64]:
    """Return the tensor, with one or two dimensions, as float32 or int64. Raises Refusal."""
    dense: memoryview | None = None
    sparse: memoryview | None = None
    dtype, shape = 0, []
    for number, wire_type, value in fields(message, where, repeated=_SHAPE):
        if number == 1 and dense is None:
            dense = view_of(value, wire_type, where)
        elif number == 2 and sparse is None:
            sparse = view_of(value, wire_type, where)
        elif number == 3:
            dtype = number_of(value, wire_type, where)
        elif number == 4:
            shape += _dimensions(value, wire_type, where)
        else:
            raise malformed(where, "two values") if number in (1, 2) else unknown_field(where, number)
        if len(shape) > 2:
            raise malformed(where, "more than two dimensions")
    if dtype not in _DTYPES:
        raise malformed(where, f"dtype {dtype}")
    if dense is not None and sparse is not None:
        raise malformed(where, "a dense and a sparse value")
    if any(size < 0 for size in shape):
        raise malformed(where, f"shape {shape}")
    if sparse is not None:
        return _from_csr(sparse, dtype, shape, where, room)
    values = _array(dense if dense is not None else memoryview(b""), dtype, where)
    if not shape:
        return values
    if math.prod(shape) != len(values):
        raise malformed(where, f"{len(values)} values for shape {shape}")
    return values.reshape(shape)


def _dimensions(value: Value, wire_type: int, where: str) -> list[int]:
    """Return the numbers of a repeated int64 field, which may be packed."""
    if wire_type != LENGTH or isinstance(value, int):
        return [number_of(value, wire_type, where)]
    found: list[int] = []
    at = 0
    while at < len(value):
        number = shift = 0
        while True:
            if at >= len(value) or shift > 63 or len(found) > 2:
                raise malformed(where, "a shape that is not a list of at most two numbers")
            byte = value[at]
            number |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                break
        found.append(number if number < 1 << 63 else -1)
    return found


def _array(view: memoryview, dtype: int, where: str) -> NDArray[np.float32] | NDArray[np.int64]:
    kind = np.dtype(_DTYPES[dtype])
    if len(view) % kind.itemsize:
        raise malformed(where, f"{len(view)} bytes, which are not a whole number of values")
    raw: NDArray[Any] = np.frombuffer(view, dtype=kind)
    if dtype == _BFLOAT16:
        # bfloat16 is the upper half of a float32.
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32) if dtype == 1 else raw.astype(np.int64)


def _from_csr(
    message: memoryview, dtype: int, shape: list[int], where: str, room: DenseRoom
) -> NDArray[np.float32] | NDArray[np.int64]:
    parts: dict[int, memoryview] = {}
    for number, wire_type, value in fields(message, where):
        if number not in (1, 2, 3):
            raise unknown_field(where, number)
        if number in parts:
            raise malformed(where, "two values")
        parts[number] = view_of(value, wire_type, where)
    empty = memoryview(b"")
    values = _array(parts.get(1, empty), dtype, where)
    starts, columns = (_array(parts.get(part, empty), 2, where) for part in (2, 3))
    if len(shape) != 2:
        raise malformed(where, f"a sparse tensor of shape {shape}")
    num_rows, num_columns = shape
    if len(starts) != num_rows + 1 or len(columns) != len(values):
        raise malformed(where, f"{len(starts)} row pointers, {len(columns)} columns, {len(values)} values for {shape}")
    if num_columns > MOST_COLUMNS:
        raise malformed(where, f"{num_columns} columns, more than {MOST_COLUMNS}")
    counts = np.diff(starts)
    if starts[0] != 0 or starts[-1] != len(values) or (counts < 0).any():
        raise malformed(where, "row pointers that do not rise from 0 to the number of values")
    if len(columns) and (columns.min() < 0 or columns.max() >= num_columns):
        raise malformed(where, f"a column index outside 0 to {num_columns - 1}")
    room.take(num_rows * num_columns * values.itemsize, where)
    rows = np.repeat(np.arange(num_rows), counts)
    if (np.diff(rows * num_columns + columns) <= 0).any():
        raise malformed(where, "column indices that do not rise within a row")
    dense = np.zeros((num_rows, num_columns), dtype=values.dtype)
    dense[rows, columns] = values
    return dense
