"""The form of a message: which of its fields hold lists and maps, and how long a list may be.

`form_of(Receipts)` is `MapForm({"type": None, "receipts": ListForm(MapForm({"rollout_id": None, ...}), 4096)})`:
`receipts` is a list of at most 4,096 maps, each other field one number or text.

Forms are read from the JSON Schema of a message, which is a published format. Python's own descriptions of types are
not read: libraries change how they define them. A schema that is not understood is a LocalProtocolError, because a
guess would make this end refuse what an honest peer sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from echo_shared.errors import LocalProtocolError
from echo_shared.messages import Message


@dataclass(frozen=True, slots=True)
class ListForm:
    """A list of at most `most` values of one form."""

    item: Form
    most: int


@dataclass(frozen=True, slots=True)
class MapForm:
    """A map; keys other than those of `fields` have no use."""

    fields: Mapping[str, Form]


Form = ListForm | MapForm | None
"""What a value may be made of; None = one number, text, boolean, nil or run of bytes."""

_REFERENCE: Final = "#/$defs/"
_PLAIN: Final = frozenset({"string", "integer", "number", "boolean", "null"})
_ALTERNATIVES: Final = ("anyOf", "oneOf", "allOf")


@cache
def form_of(kind: type[Message]) -> MapForm:
    """Return the form of a kind of message. Raises LocalProtocolError when its schema is not understood."""
    schema = kind.model_json_schema(by_alias=False, mode="validation")
    form = _form(schema, schema.get("$defs", {}), kind.__name__)
    if not isinstance(form, MapForm) or form.fields.keys() != kind.model_fields.keys():
        raise _not_understood(kind.__name__, schema)
    return form


def _form(schema: Mapping[str, Any], definitions: Mapping[str, Any], place: str) -> Form:
    for word in _ALTERNATIVES:
        if word in schema:
            return _only_container([_form(each, definitions, place) for each in schema[word]], schema, place)
    if "$ref" in schema:
        return _form(definitions[schema["$ref"].removeprefix(_REFERENCE)], definitions, place)
    match schema:
        case {"const": value} if not isinstance(value, (list, dict)):
            return None
        case {"enum": values} if not any(isinstance(value, (list, dict)) for value in values):
            return None
        case {"type": "object", "properties": fields}:
            return MapForm({name: _form(each, definitions, f"{place}.{name}") for name, each in fields.items()})
        case {"type": "array", "prefixItems": items, "maxItems": most}:
            forms = [_form(each, definitions, place) for each in items]
            return ListForm(_only_container(forms, schema, place), most)
        case {"type": "array", "items": item, "maxItems": most}:
            return ListForm(_form(item, definitions, place), most)
        case {"type": str(name)} if name in _PLAIN:
            return None
    raise _not_understood(place, schema)


def _only_container(forms: list[Form], schema: Mapping[str, Any], place: str) -> Form:
    """Return the form that all these values fit: a form says nothing of plain values, so one container is enough."""
    containers = [form for form in forms if form is not None]
    if any(form != containers[0] for form in containers):
        raise _not_understood(place, schema)
    return containers[0] if containers else None


def _not_understood(place: str, schema: Mapping[str, Any]) -> LocalProtocolError:
    return LocalProtocolError(
        "The form of a message cannot be told.",
        got=f"{place}: {schema!r}"[:400],
        do="Install the versions of libraries that this release of Echo was tested with.",
    )
