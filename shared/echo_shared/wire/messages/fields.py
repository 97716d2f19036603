"""Field types of messages: packed arrays, printable text, keys and bounded numbers."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

MAX_TOKENS: Final = 131_072
_PACKED: Final = frozenset({"dtype", "shape", "data"})


def pack_array(array: NDArray[Any]) -> dict[str, Any]:
    """Pack `array`, of any shape, as {dtype, shape, data} with contiguous little-endian bytes."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return {"dtype": little.dtype.str, "shape": list(little.shape), "data": little.tobytes()}


def unpack_array(value: Any, *, dtype: str, max_length: int) -> NDArray[Any]:
    """Return the array [N] packed in `value`. Raises ValueError for another dtype or more than `max_length` items."""
    if isinstance(value, np.ndarray):
        value = pack_array(value)
    if not isinstance(value, dict) or value.keys() != _PACKED:
        raise ValueError("an array must be a map of dtype, shape and data")
    shape, data = value["shape"], value["data"]
    if value["dtype"] != dtype:
        raise ValueError(f"the array's dtype must be {dtype}")
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int or not 0 <= shape[0] <= max_length:
        raise ValueError(f"the array's shape must be [n] with n at most {max_length}")
    kind = np.dtype(dtype)
    if not isinstance(data, bytes) or len(data) != shape[0] * kind.itemsize:
        raise ValueError("the array's data does not have the length that its shape gives")
    array = np.frombuffer(data, dtype=kind)
    if kind.kind == "f" and np.count_nonzero(np.isfinite(array)) < len(array):
        raise ValueError("the array holds a value that is not finite")
    return array


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedArray:
    """Annotation of a field that holds an array [N], which travels in the form of `pack_array`.

    The annotation supplies pydantic's schema, so that numpy's definition of `NDArray` does not matter: up to numpy 2.4
    `NDArray[np.int32]` is a generic alias, since 2.5 a type alias.
    """

    dtype: str
    within_one: bool = False
    """True: all values must lie between 0 and 1."""

    @classmethod
    def of(cls, hint: Any) -> PackedArray | None:
        """Return the annotation of a field's type, or None if the field is not an array."""
        return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, cls)), None)

    def unpack(self, value: Any) -> NDArray[Any]:
        """Return the array [N] packed in `value`. Raises ValueError if it breaks this annotation's limits."""
        array = unpack_array(value, dtype=self.dtype, max_length=MAX_TOKENS)
        if self.within_one and len(array) and not 0.0 <= array.min() <= array.max() <= 1.0:
            raise ValueError("the array holds a value that is not between 0 and 1")
        return array

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        packed = core_schema.plain_serializer_function_ser_schema(pack_array)
        return core_schema.no_info_plain_validator_function(self.unpack, serialization=packed)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        shape = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS}, "maxItems": 1}
        properties = {"dtype": {"const": self.dtype}, "shape": shape, "data": {"type": "string", "format": "binary"}}
        return {"type": "object", "properties": properties, "required": list(properties)}


TokenIds = Annotated[NDArray[np.int32], PackedArray(dtype="<i4")]
Logprobs = Annotated[NDArray[np.float32], PackedArray(dtype="<f4")]
Shares = Annotated[NDArray[np.float32], PackedArray(dtype="<f4", within_one=True)]


_UNPRINTABLE: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: control, format (for example text direction), surrogate, line separator, paragraph separator."""


def printable(text: str) -> str:
    """Replace characters that could control a terminal or fake log lines by "?"; keep "\\n" and "\\t"."""
    return "".join(char if char in "\n\t" or unicodedata.category(char) not in _UNPRINTABLE else "?" for char in text)


def printable_line(text: str) -> str:
    """Like `printable`, but also replace line breaks and tabs."""
    return printable(text.replace("\n", "?").replace("\t", "?"))


Name = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(printable_line)]
Text = Annotated[str, Field(max_length=2_000), AfterValidator(printable)]
PublicKey = Annotated[bytes, Field(min_length=32, max_length=32)]
Signature = Annotated[bytes, Field(min_length=64, max_length=64)]
Nonce = Annotated[bytes, Field(min_length=32, max_length=32)]
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]
Count = Annotated[int, Field(ge=0, le=2**53)]
PolicyVersion = Annotated[int, Field(ge=0, lt=2**31)]
FIRST_TENANT_VERSION: Final = 2**30
"""Smallest number of an adapter that a tenant publishes. Smaller numbers are versions of the run's own training; 0 is
the base model."""
Lax = Field(strict=False)
"""Accept lists and strings for tuples and enums, which MessagePack lacks. The items are still checked strictly."""

InfoHash = Annotated[bytes, Field(min_length=20, max_length=20)]
NodeId = Annotated[str, Field(pattern=r"^[0-9a-z]{1,64}$")]
PieceIndex = Annotated[int, Field(ge=0, lt=2**20)]
Peer = Annotated[tuple[Annotated[str, Field(max_length=255)], Annotated[int, Field(ge=1, le=65535)]], Lax]
RolloutId = Annotated[str, Field(min_length=3, max_length=48, pattern=r"^[0-9]+-[0-9]+$")]
