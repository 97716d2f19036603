"""The form of a message: which fields hold lists and maps, and how long each list may be.

`form_of(Receipts)` is `MapForm({"type": None, "receipts": ListForm(MapForm({"rollout_id": None, ...}), 4096)})`:
`receipts` is a list of at most 4,096 maps; every other field is one number or text.

Forms are derived from a message's JSON Schema, a published format, because Python libraries change how they represent
types. An unknown schema raises LocalProtocolError: a guess could refuse messages of honest peers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from echo_shared.errors import LocalProtocolError
from echo_shared.wire.messages import WireMessage


@dataclass(frozen=True, slots=True)
class ListForm:
    """Form of a list: at most `most` items, all of one form."""

    item: Form
    most: int


@dataclass(frozen=True, slots=True)
class MapForm:
    """Form of a map: the form of each field. Keys that `fields` lacks are ignored."""

    fields: Mapping[str, Form]


Form = ListForm | MapForm | None
"""Form of a value. None: one number, text, boolean, nil or byte string."""

_REFERENCE: Final = "#/$defs/"
_PLAIN: Final = frozenset({"string", "integer", "number", "boolean", "null"})
_ALTERNATIVES: Final = ("anyOf", "oneOf", "allOf")


@cache
def form_of(kind: type[WireMessage]) -> MapForm:
    """Return the form of a message class. Raises LocalProtocolError for a schema that this module does not
    understand.
    """
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
    """Return the only list or map form among the alternatives, None if all are plain values."""
    containers = [form for form in forms if form is not None]
    if any(form != containers[0] for form in containers):
        raise _not_understood(place, schema)
    return containers[0] if containers else None


def _not_understood(place: str, schema: Mapping[str, Any]) -> LocalProtocolError:
    return LocalProtocolError(
        "The schema of a message is not understood.",
        got=f"{place}: {schema!r}"[:400],
        do="Install the versions of libraries that this release of Echo was tested with.",
    )
