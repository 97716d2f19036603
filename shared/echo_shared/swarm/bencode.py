"""Bencoding, the encoding of torrents and tracker answers (https://www.bittorrent.org/beps/bep_0003.html).

Pure Python, so that hub and node also work without libtorrent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from echo_shared.errors import CodecError

Value: TypeAlias = "int | bytes | list[Value] | dict[str, Value]"
Encodable: TypeAlias = "int | bytes | str | Sequence[Encodable] | Mapping[str, Encodable]"

MAX_DEPTH: Final = 32
"""Maximum nesting depth. Torrents and tracker answers stay far below."""
_MAX_DIGITS: Final = 19


def encode(value: Encodable) -> bytes:
    """Return the canonical encoding of `value`: keys sorted, text in UTF-8."""
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return b"%d:%b" % (len(value), value)
    if isinstance(value, int):
        return b"i%de" % value
    if isinstance(value, Mapping):
        return b"d%be" % b"".join(encode(key) + encode(value[key]) for key in sorted(value, key=str.encode))
    return b"l%be" % b"".join(encode(item) for item in value)


def decode(data: bytes) -> Value:
    """Return the value that `data` encodes. Raises CodecError unless `data` is the value's canonical encoding."""
    try:
        value, end = _decode(data, 0, MAX_DEPTH)
    except (ValueError, IndexError) as error:
        raise CodecError("Bytes are not bencoded.", got=f"{len(data)} bytes: {error}") from error
    if end != len(data):
        raise CodecError("Bytes are not bencoded.", got=f"{len(data) - end} bytes after the end")
    return value


def _decode(data: bytes, at: int, depth: int) -> tuple[Value, int]:
    if depth == 0:
        raise ValueError("nested too deeply")
    kind = data[at : at + 1]
    if kind == b"i":
        end = data.index(b"e", at, at + _MAX_DIGITS + 3)
        return _integer(data[at + 1 : end]), end + 1
    if kind == b"l":
        return _decode_list(data, at + 1, depth - 1)
    if kind == b"d":
        return _decode_dict(data, at + 1, depth - 1)
    return _decode_bytes(data, at)


def _decode_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    colon = data.index(b":", at, at + _MAX_DIGITS + 1)
    start = colon + 1
    end = start + _integer(data[at:colon])
    if not start <= end <= len(data):
        raise ValueError("a string ends past the data")
    return data[start:end], end


def _decode_list(data: bytes, at: int, depth: int) -> tuple[Value, int]:
    items: list[Value] = []
    while data[at] != ord("e"):
        item, at = _decode(data, at, depth)
        items.append(item)
    return items, at + 1


def _decode_dict(data: bytes, at: int, depth: int) -> tuple[Value, int]:
    items: dict[str, Value] = {}
    last: bytes | None = None
    while data[at] != ord("e"):
        key, at = _decode_bytes(data, at)
        if last is not None and key <= last:
            raise ValueError("a dictionary's keys are not in order")
        items[key.decode()], at = _decode(data, at, depth)
        last = key
    return items, at + 1


def _integer(digits: bytes) -> int:
    value = int(digits)
    if b"%d" % value != digits:
        raise ValueError("a number is not in its shortest form")
    return value
