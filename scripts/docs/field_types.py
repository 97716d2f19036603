"""Describe pydantic fields for the reference pages: type, bounds and default."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import annotated_types
import numpy as np
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from echo_shared.wire.messages.fields import PackedArray
from scripts.docs.markdown import code

_PLAIN: Final = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    bytes: "bytes",
    type(None): "none",
    Any: "anything",
}


def in_words(kind: Any, metadata: Iterable[Any] = ()) -> str:
    """Return a field's type, with its bounds from `metadata`, as Markdown for a table cell."""
    metadata = tuple(metadata)
    for part in metadata:
        if isinstance(part, PackedArray):
            return f"array of {np.dtype(part.dtype).name}"
    bounds = ", ".join(_bounds(metadata, counted=_counted(kind)))
    return _kind(kind) + (f", {bounds}" if bounds else "")


def of_field(field: FieldInfo) -> str:
    return in_words(field.annotation, field.metadata)


def default(field: FieldInfo) -> str:
    """Return a field's default as code; empty for a required field."""
    value = field.get_default(call_default_factory=True, validated_data={})
    return "" if value is PydanticUndefined else code(_literal(value))


def models_in(kind: Any) -> Iterator[type[BaseModel] | type[Enum]]:
    """Yield the models and enumerations in a type, also inside tuples and unions. The fields of these models are not
    searched.
    """
    if isinstance(kind, type) and issubclass(kind, (BaseModel, Enum)):
        yield kind
    if get_origin(kind) is not Literal:
        for part in get_args(kind):
            yield from models_in(part)


def _literal(value: Any) -> str:
    match value:
        case BaseModel():
            return "its own defaults"
        case Enum():
            return _literal(value.value)
        case str():
            return f'"{value}"'
        case tuple():
            return "[" + ", ".join(map(_literal, value)) + "]"
        case bool() | None:
            return str(value).lower()
    return repr(value)


def _kind(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return in_words(parts[0], parts[1:])
    if origin is Literal:
        return " or ".join(code(_literal(value)) for value in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(in_words(part) for part in parts)
    if origin is tuple:
        return f"list of {_item(parts[0])}" if parts[-1] is Ellipsis else "[" + "; ".join(map(in_words, parts)) + "]"
    if origin in (dict, list):
        return f"table of {_item(parts[1])}" if origin is dict else f"list of {_item(parts[0])}"
    if kind in _PLAIN:
        return _PLAIN[kind]
    assert isinstance(kind, type), kind
    return f"[{kind.__name__}](#{kind.__name__.lower()})"


def _item(kind: Any) -> str:
    words = in_words(kind)
    return f"({words})" if ", " in words else words


def _counted(kind: Any) -> str:
    """Return the unit of a value's length: characters, bytes or items."""
    return {str: "characters", bytes: "bytes"}.get(kind, "items")


def _bounds(metadata: Iterable[Any], *, counted: str) -> Iterator[str]:
    least = most = None
    for part in metadata:
        parts = list(part.metadata) if isinstance(part, FieldInfo) else [part]
        for one in parts:
            match one:
                case annotated_types.Ge(ge=bound):
                    yield f"at least {number(bound)}"
                case annotated_types.Gt(gt=bound):
                    yield f"more than {number(bound)}"
                case annotated_types.Le(le=bound):
                    yield f"at most {number(bound)}"
                case annotated_types.Lt(lt=bound):
                    yield f"less than {number(bound)}"
                case annotated_types.MinLen(min_length=bound):
                    least = bound
                case annotated_types.MaxLen(max_length=bound):
                    most = bound
                case _ if pattern := getattr(one, "pattern", None):
                    yield f"like {code(pattern if isinstance(pattern, str) else pattern.pattern)}"
    if least == most and most is not None:
        yield f"{most:,} {counted}"
    elif least == 1 and most is None:
        yield "not empty"
    elif most is not None:
        yield f"{least:,} to {most:,} {counted}" if least else f"at most {most:,} {counted}"
    elif least:
        yield f"at least {least:,} {counted}"


def number(bound: Any) -> str:
    """Return a bound as text: with thousands separators, and as 2^N for large powers of two."""
    if isinstance(bound, int) and bound > 2**24:
        for less in (0, 1):
            if re.fullmatch("0b10*", bin(bound + less)):
                return f"2^{(bound + less).bit_length() - 1}" + (" - 1" if less else "")
    return f"{int(bound) if bound == int(bound) else bound:,}"
