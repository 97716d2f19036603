"""Reference of the wire protocol, generated from the message classes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, get_args

from pydantic import BaseModel

from echo_shared.described import attribute_docstrings
from echo_shared.wire import messages, sessions
from echo_shared.wire.messages.fields import MAX_TOKENS
from scripts.docs import field_types
from scripts.docs.markdown import code, paragraphs, table, text


def page() -> str:
    """Return a page of all messages, their parts, and the handshake."""
    from_hub, from_node = get_args(messages.FromHub), get_args(messages.FromNode)
    parts = [
        f"# Wire protocol\n\nVersion {messages.PROTOCOL_VERSION}; peers from version "
        f"{messages.OLDEST_PROTOCOL_VERSION} are supported. A frame has at most {messages.MAX_FRAME_BYTES:,} bytes, "
        f"a node's frame at most {messages.MAX_FRAME_FROM_NODE_BYTES:,}.\n\n",
        paragraphs(messages.__doc__).partition("\nReading order")[0].rstrip()
        + f" An array has at most {MAX_TOKENS:,} items.\n\n",
        "## How they meet\n\n",
        paragraphs(sessions.__doc__),
        "## What the hub says\n\n",
        *map(_model, from_hub),
        "## What the node says\n\n",
        *map(_model, from_node),
        "## What is in them\n\n",
        *map(_part, parts_of([*from_hub, *from_node])),
        _enumeration(messages.RefusalCode),
    ]
    return "".join(parts)


def parts_of(kinds: Iterable[type[BaseModel]]) -> list[type[Any]]:
    """Return the models and enumerations in the fields of `kinds`, at any depth, sorted by name."""
    found: dict[str, type[Any]] = {}
    waiting = [part for kind in kinds for part in _in_fields(kind)]
    while waiting:
        part = waiting.pop()
        if part.__name__ not in found:
            found[part.__name__] = part
            waiting += _in_fields(part)
    return [found[name] for name in sorted(found)]


def _in_fields(kind: type[Any]) -> list[type[Any]]:
    if not issubclass(kind, BaseModel):
        return []
    return [part for field in kind.model_fields.values() for part in field_types.models_in(field.annotation)]


def _part(kind: type[Any]) -> str:
    return _enumeration(kind) if issubclass(kind, Enum) else _model(kind)


def _model(kind: type[BaseModel]) -> str:
    said = attribute_docstrings(kind)
    rows = [
        (
            code(name),
            field_types.of_field(field),
            "" if name == "type" else field_types.default(field),
            text(said.get(name)),
        )
        for name, field in kind.model_fields.items()
    ]
    return (
        f"### {kind.__name__}\n\n{paragraphs(kind.__doc__)}{table(('field', 'type', 'if left out', 'meaning'), rows)}"
    )


def _enumeration(kind: type[Enum]) -> str:
    said = attribute_docstrings(kind)
    rows = [(code(str(member.value)), text(said.get(member.name))) for member in kind]
    return f"### {kind.__name__}\n\n{paragraphs(kind.__doc__)}{table(('value', 'meaning'), rows)}"
