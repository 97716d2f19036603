"""Encoding of messages as frames, one MessagePack map each, and decoding.

A small frame can expand to a hundred times its size in memory and cost seconds of processing: 8 MiB of empty lists, for
example. Large frames are therefore decoded along the message's field types: scalar fields accept no lists, lists are
limited to their maximum length, and unknown fields are skipped without decoding. Small frames are decoded first, then
checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Annotated, Any, Final, TypeVar, get_args

import msgpack
import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from echo_shared.errors import CodecError, LocalProtocolError
from echo_shared.wire.message_form import Form, ListForm, MapForm, form_of
from echo_shared.wire.messages import MAX_FRAME_BYTES, FromHub, FromNode, WireMessage, specimens
from echo_shared.wire.messages.fields import pack_array, printable_line

_T = TypeVar("_T")

SMALL_BYTES: Final = 16_384
"""Frames up to this size are decoded before any check: each byte gives at most one value, so they cannot cost much."""
MOST_FIELDS: Final = 64
"""Maximum entries of one map. No message has as many fields; the rest is for unknown fields of a newer peer."""
_CONTAINERS: Final = frozenset([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
"""First bytes of MessagePack maps and arrays."""

_from_hub: TypeAdapter[FromHub] = TypeAdapter(Annotated[FromHub, Field(discriminator="type")])
_from_node: TypeAdapter[FromNode] = TypeAdapter(Annotated[FromNode, Field(discriminator="type")])
_BY_TYPE: Final[Mapping[str, type[WireMessage]]] = {
    kind.model_fields["type"].default: kind for kind in (*get_args(FromHub), *get_args(FromNode))
}


def encode(message: FromHub | FromNode) -> bytes:
    frame: bytes = msgpack.packb(message.__dict__, default=_plain)
    return frame


def _plain(value: object) -> dict[str, Any]:
    if isinstance(value, WireMessage):
        return value.__dict__
    if isinstance(value, np.ndarray):
        return pack_array(value)
    raise TypeError(f"no message has a {type(value).__name__}")


def decode_from_hub(frame: bytes) -> FromHub:
    """Return the message in `frame`.

    Raises CodecError unless the frame is one valid message that a hub may send; LocalProtocolError if this installation
    cannot even decode its own messages.
    """
    return _decode(frame, _from_hub)


def decode_from_node(frame: bytes) -> FromNode:
    """Return the message in `frame`, sent by a node. Raises like `decode_from_hub`."""
    return _decode(frame, _from_node)


@cache
def check_codec() -> None:
    """Raise LocalProtocolError unless this installation can decode the large frames that it encodes.

    Library versions that Echo was not tested with are the usual cause. Every node and hub checks this before it
    connects.
    """
    try:
        of_hub, of_node = specimens.from_hub(), specimens.from_node()
    except ValidationError as error:
        raise _cannot_read(_said(error)) from error
    _check(of_hub, _from_hub)
    _check(of_node, _from_node)


def _check(messages: Sequence[FromHub | FromNode], adapter: TypeAdapter[Any]) -> None:
    for message in messages:
        frame = encode(message)
        try:
            is_same = encode(_decoded(frame, adapter)) == frame
        except CodecError as error:
            raise _cannot_read(f"{message.type}: {error.brief}") from error
        if not is_same:
            raise _cannot_read(f"{message.type}: decoding changes it")


def _cannot_read(got: str) -> LocalProtocolError:
    libraries = ", ".join(f"{name} {metadata.version(name)}" for name in ("msgpack", "numpy", "pydantic"))
    return LocalProtocolError(
        "This installation cannot read Echo's own messages.",
        got=f"{got} (with {libraries})",
        do="Install the versions of these libraries that constraints.txt names, and report the error.",
    )


def _decode(frame: bytes, adapter: TypeAdapter[_T]) -> _T:
    try:
        return _decoded(frame, adapter)
    except CodecError:
        check_codec()  # Blame the peer only if this installation can decode a valid frame.
        raise


def _decoded(frame: bytes, adapter: TypeAdapter[_T]) -> _T:
    if len(frame) > MAX_FRAME_BYTES:
        raise CodecError("A message is too large.", got=f"{len(frame)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    try:
        value = msgpack.unpackb(frame) if len(frame) <= SMALL_BYTES else _read(frame)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CodecError("A message is not MessagePack.", got=f"{len(frame)} bytes: {error}") from error
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise _not_valid(_said(error)) from error


def _said(error: ValidationError) -> str:
    """Return the first fault and its place. pydantic may quote the peer's data, so the text is shortened and made
    printable.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "the message"
    return printable_line(f"{place}: {first['msg']}")[:200]


def _not_valid(got: str) -> CodecError:
    return CodecError("A message is not valid.", got=got)


_TYPE: Final = MapForm({"type": None})
"""Form that decodes only a frame's type."""


def _read(frame: bytes) -> Any:
    """Decode the map in `frame`, restricted to the fields of the message type that the frame names."""
    found = _Reader(frame, "the message").read(_TYPE)
    if not isinstance(found, dict):
        raise _not_valid(f"the message: {type(found).__name__} instead of a map")
    name = str(found.get("type"))[:64]
    kind = _BY_TYPE.get(name)
    return _Reader(frame, name).read(_TYPE if kind is None else form_of(kind))


class _Reader:
    """Decodes one frame, which may hold only the lists and maps of a form (the structure of a message). Raises
    CodecError if the frame does not fit the form, ValueError if it is not MessagePack.
    """

    def __init__(self, frame: bytes, name: str) -> None:
        self._frame = frame
        self._place = [name]
        """Message name, then the keys that lead to the value being decoded, for error texts."""
        self._unpacker = msgpack.Unpacker(read_size=len(frame), max_buffer_size=len(frame))
        self._unpacker.feed(frame)

    def read(self, form: Form) -> Any:
        value = self._value(form)
        if self._unpacker.tell() != len(self._frame):
            raise ValueError("extra bytes follow its end")
        return value

    def _value(self, form: Form) -> Any:
        at = self._unpacker.tell()
        if at >= len(self._frame):
            raise ValueError("it ends too early")
        if self._frame[at] not in _CONTAINERS:
            return self._unpacker.unpack()
        if isinstance(form, MapForm):
            return self._map(form)
        if isinstance(form, ListForm):
            return self._list(form)
        raise self._not_valid("a list or a map instead of a number or a text")

    def _map(self, form: MapForm) -> dict[Any, Any]:
        number = self._unpacker.read_map_header()
        if number > MOST_FIELDS:
            raise self._not_valid(f"a map of {number} entries, at most {MOST_FIELDS} are allowed")
        values = {}
        for _ in range(number):
            key = self._value(None)
            if key in form.fields:
                self._place.append(key)
                values[key] = self._value(form.fields[key])
                self._place.pop()
            else:
                self._unpacker.skip()
        return values

    def _list(self, form: ListForm) -> list[Any]:
        number = self._unpacker.read_array_header()
        if number > form.most:
            raise self._not_valid(f"a list of {number} items, at most {form.most} are allowed")
        return [self._value(form.item) for _ in range(number)]

    def _not_valid(self, got: str) -> CodecError:
        return _not_valid(printable_line(f"{'.'.join(self._place)}: {got}")[:200])
