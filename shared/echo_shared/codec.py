"""Messages as frames, and back: one MessagePack map each, of which nothing is built that its message has no use for.

A frame of a few bytes a value can ask for a hundred times its size in memory, and for seconds: 8 MiB of empty lists.
So large frames are read by their message's own fields: where it has a number or a text no list is built, lists are no
longer than it says, and what it does not know is skipped. Small ones are built at once, and looked at afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

import msgpack
import numpy as np
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from echo_shared.errors import CodecError
from echo_shared.messages import MAX_FRAME_BYTES, FromHub, FromNode, Message
from echo_shared.messages.fields import pack_array, printable_line

_T = TypeVar("_T")

SMALL_BYTES: Final = 16_384
"""A frame of no more is built at once: it holds no more values than bytes."""
MOST_FIELDS: Final = 64
"""Of one map. No message has as many; a newer peer's may have more than are known here."""
_CONTAINERS: Final = frozenset([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
"""First bytes of MessagePack's maps and arrays."""

_from_hub: TypeAdapter[FromHub] = TypeAdapter(Annotated[FromHub, Field(discriminator="type")])
_from_node: TypeAdapter[FromNode] = TypeAdapter(Annotated[FromNode, Field(discriminator="type")])
_BY_TYPE: Final[Mapping[str, type[Message]]] = {
    kind.model_fields["type"].default: kind for kind in (*get_args(FromHub), *get_args(FromNode))
}


def encode(message: FromHub | FromNode) -> bytes:
    """The message as one frame."""
    frame: bytes = msgpack.packb(message.__dict__, default=_plain)
    return frame


def _plain(value: object) -> dict[str, Any]:
    """What of a message MessagePack has no type for: the messages within it, and arrays."""
    if isinstance(value, Message):
        return value.__dict__
    if isinstance(value, np.ndarray):
        return pack_array(value)
    raise TypeError(f"no message has a {type(value).__name__}")


def decode_from_hub(frame: bytes) -> FromHub:
    """The message in `frame`. Raises CodecError unless it is one valid message that a hub may send."""
    return _decode(frame, _from_hub)


def decode_from_node(frame: bytes) -> FromNode:
    """The message in `frame`. Raises CodecError unless it is one valid message that a node may send."""
    return _decode(frame, _from_node)


def _decode(frame: bytes, adapter: TypeAdapter[_T]) -> _T:
    if len(frame) > MAX_FRAME_BYTES:
        raise CodecError("A message is too large.", got=f"{len(frame)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    try:
        value = msgpack.unpackb(frame) if len(frame) <= SMALL_BYTES else _read(frame)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CodecError("A message is not MessagePack.", got=f"{len(frame)} bytes: {error}") from error
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the message"
        # pydantic may quote the peer: what goes into logs and pages is cut and made printable.
        raise _not_valid(printable_line(f"{place}: {first['msg']}")[:200]) from error


def _not_valid(got: str) -> CodecError:
    return CodecError("A message is not valid.", got=got)


@dataclass(frozen=True, slots=True)
class _Tuple:
    """A list of values of one form."""

    item: _Form
    most: int


@dataclass(frozen=True, slots=True)
class _Map:
    """A map of which these keys matter."""

    fields: Mapping[str, _Form]


_Form = _Tuple | _Map | None
"""What a value may be made of; None: it is no container."""

_TYPE: Final = _Map({"type": None})
_ARRAY: Final = _Map({"dtype": None, "shape": _Tuple(None, 1), "data": None})


def _read(frame: bytes) -> Any:
    """The map in `frame`, as far as the message that it says it is knows its fields."""
    found = _Reader(frame, "the message").read(_TYPE)
    if not isinstance(found, dict):
        raise _not_valid(f"the message: {type(found).__name__}, where a map was expected")
    name = str(found.get("type"))[:64]
    kind = _BY_TYPE.get(name)
    return _Reader(frame, name).read(_TYPE if kind is None else _form_of(kind))


class _Reader:
    """Raises CodecError where the frame is not as the form says, and ValueError where it is no MessagePack."""

    def __init__(self, frame: bytes, name: str) -> None:
        self._frame = frame
        self._place = [name]
        """The message's name, and the keys of the value that is being read, from the outermost in."""
        self._unpacker = msgpack.Unpacker(read_size=len(frame), max_buffer_size=len(frame))
        self._unpacker.feed(frame)

    def read(self, form: _Form) -> Any:
        """The frame's only value."""
        value = self._value(form)
        if self._unpacker.tell() != len(self._frame):
            raise ValueError("there is more after its end")
        return value

    def _value(self, form: _Form) -> Any:
        at = self._unpacker.tell()
        if at >= len(self._frame):
            raise ValueError("it ends too soon")
        if self._frame[at] not in _CONTAINERS:
            return self._unpacker.unpack()
        if isinstance(form, _Map):
            return self._map(form)
        if isinstance(form, _Tuple):
            return self._list(form)
        raise self._not_valid("a list or a map, where a number or a text was expected")

    def _map(self, form: _Map) -> dict[Any, Any]:
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

    def _list(self, form: _Tuple) -> list[Any]:
        number = self._unpacker.read_array_header()
        if number > form.most:
            raise self._not_valid(f"a list of {number} items, at most {form.most} are allowed")
        return [self._value(form.item) for _ in range(number)]

    def _not_valid(self, got: str) -> CodecError:
        return _not_valid(printable_line(f"{'.'.join(self._place)}: {got}")[:200])


@cache
def _form_of(kind: type[Message]) -> _Map:
    return _Map({name: _form(field.annotation, field.metadata) for name, field in kind.model_fields.items()})


def _form(annotation: Any, metadata: list[Any]) -> _Form:
    """The form of a field's values, whichever of its types they are of."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _form(arguments[0], [*metadata, *arguments[1:]])
    if origin is np.ndarray:
        return _ARRAY
    if origin is tuple:
        if arguments[-1] is not Ellipsis:
            assert all(_form(each, []) is None for each in arguments), "of unlike values only plain ones"
            return _Tuple(None, len(arguments))
        most = [each.max_length for each in _constraints(metadata) if hasattr(each, "max_length")]
        return _Tuple(_form(arguments[0], []), most[0])
    if isinstance(annotation, type) and issubclass(annotation, Message):
        return _form_of(annotation)
    forms = [_form(each, metadata) for each in arguments if each is not NoneType]
    return next((form for form in forms if form is not None), None)


def _constraints(metadata: list[Any]) -> list[Any]:
    return [part for each in metadata for part in (each.metadata if isinstance(each, FieldInfo) else [each])]
