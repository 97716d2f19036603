"""Read and write fields of protobuf messages (https://protobuf.dev/programming-guides/encoding/).

The reader is strict, and it copies nothing: a nested message is a view of the body. So a body of B bytes needs no more
than B bytes and a small number of objects at the same time, whatever its bytes say.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator
from typing import Final

from echo_hub.tenants.refusal import Refusal, RefusalKind

VARINT: Final = 0
FIXED64: Final = 1
LENGTH: Final = 2
_MOST_VARINT_BYTES: Final = 10
_DO: Final = "Send the message as tinker 0.38 encodes it."

Value = int | memoryview
"""An integer, the 8 bytes of a fixed64 field, or the bytes of a field with a length."""


def malformed(where: str, got: str) -> Refusal:
    """Return the refusal of a body in which the part `where` is not a valid message."""
    return Refusal(RefusalKind.INVALID, f"The field {where} of the request is malformed.", got=got, do=_DO, param=where)


def fields(message: memoryview, where: str, *, repeated: Container[int] = ()) -> Iterator[tuple[int, int, Value]]:
    """Yield (field number, wire type, value) of each field in order. `where` names the message in refusals.

    A field may come only once, unless its number is in `repeated`: to decode millions of short fields would take half a
    minute.
    """
    at, end = 0, len(message)
    seen: set[int] = set()
    while at < end:
        key, at = _varint(message, at, where)
        number, wire_type = key >> 3, key & 7
        if number == 0:
            raise malformed(where, "a field with number 0")
        if number not in repeated:
            if number in seen:
                raise malformed(where, f"field {number} more than once")
            seen.add(number)
        if wire_type == VARINT:
            value, at = _varint(message, at, where)
            yield number, wire_type, value
            continue
        if wire_type == LENGTH:
            size, at = _varint(message, at, where)
        elif wire_type == FIXED64:
            size = 8
        else:
            raise malformed(where, f"field {number} with wire type {wire_type}")
        if size > end - at:
            raise malformed(where, f"field {number} of {size} bytes, of which {end - at} are there")
        yield number, wire_type, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int, where: str) -> tuple[int, int]:
    value = shift = 0
    for index in range(at, min(at + _MOST_VARINT_BYTES, len(message))):
        byte = message[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= 1 << 64:
                break
            return value, index + 1
        shift += 7
    raise malformed(where, "a number that does not end")


def view_of(value: Value, wire_type: int, where: str) -> memoryview:
    """Return the bytes of a field that must have a length."""
    if wire_type != LENGTH or isinstance(value, int):
        raise malformed(where, f"wire type {wire_type} in place of {LENGTH}")
    return value


def number_of(value: Value, wire_type: int, where: str) -> int:
    """Return a field that must be a varint, as a signed 64-bit number."""
    if wire_type != VARINT or not isinstance(value, int):
        raise malformed(where, f"wire type {wire_type} in place of {VARINT}")
    return value - (1 << 64) if value >= 1 << 63 else value


def double_of(value: Value, wire_type: int, where: str) -> float:
    if wire_type != FIXED64 or isinstance(value, int):
        raise malformed(where, f"wire type {wire_type} in place of {FIXED64}")
    return float(struct.unpack("<d", value)[0])


def text_of(value: Value, wire_type: int, where: str, *, most: int) -> str:
    """Return a field that must be UTF-8 text of at most `most` bytes."""
    view = view_of(value, wire_type, where)
    if len(view) > most:
        raise malformed(where, f"{len(view)} bytes of text, more than {most}")
    try:
        return str(view, "utf-8")
    except UnicodeDecodeError as error:
        raise malformed(where, "text that is not UTF-8") from error


def unknown_field(where: str, number: int) -> Refusal:
    """Return the refusal of an unknown field. Unknown fields are not skipped, because a skipped option could change the
    result."""
    return Refusal(
        RefusalKind.INVALID,
        f"This hub does not know field {number} of {where}.",
        do="Use a version of the tinker SDK that this hub's documentation names.",
        param=where,
    )


def entry_of(message: memoryview, where: str, *, most: int) -> tuple[str, list[tuple[int, Value]]]:
    """Return the key of an entry of a protobuf map, and the (wire type, value) of its value. The list is empty if the
    entry has no value."""
    key = ""
    found: list[tuple[int, Value]] = []
    for number, wire_type, value in fields(message, where):
        if number == 1:
            key = text_of(value, wire_type, f"{where}'s key", most=most)
        elif number == 2 and not found:
            found.append((wire_type, value))
        elif number == 2:
            raise malformed(where, "an entry with two values")
        else:
            raise unknown_field(where, number)
    return key, found


def put_number(out: bytearray, number: int, value: int) -> None:
    """Append a varint field. 0 is the default and is left out."""
    if value:
        _put_varint(out, number << 3 | VARINT)
        _put_varint(out, value & ((1 << 64) - 1))


def put_bytes(out: bytearray, number: int, value: bytes | bytearray | memoryview) -> None:
    """Append a field with a length: bytes, text or a message."""
    _put_varint(out, number << 3 | LENGTH)
    _put_varint(out, len(value))
    out += value


def put_double(out: bytearray, number: int, value: float) -> None:
    _put_varint(out, number << 3 | FIXED64)
    out += struct.pack("<d", value)


def _put_varint(out: bytearray, value: int) -> None:
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
