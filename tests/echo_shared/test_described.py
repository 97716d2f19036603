from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, ClassVar

from pydantic import Field

from echo_shared.described import Described, attribute_docstrings


class Fruit(Enum):
    """Not of an attribute."""

    APPLE = "apple"
    """Round, and
    red."""
    PEAR = "pear"
    PLUM: str = "plum"
    """Blue."""


class Place(Described):
    """Of the class."""

    town: str
    """Where
    it is."""
    note: Annotated[str, Field(description="An own one.")] = ""
    """Not this."""
    KIND: ClassVar[str] = "place"
    """No field."""


class Shop(Place):
    at: Place
    """Its place."""
    town: str
    """Its town."""


def test_an_attributes_docstring_is_the_string_after_it() -> None:
    assert attribute_docstrings(Fruit) == {"APPLE": "Round, and\nred.", "PLUM": "Blue."}


def test_a_schema_describes_own_inherited_and_inner_fields() -> None:
    schema = Shop.model_json_schema()
    inner = schema["$defs"]["Place"]
    assert told(schema) == {"town": "Its town.", "note": "An own one.", "at": "Its place."}
    assert told(inner) == {"town": "Where\nit is.", "note": "An own one."}
    assert (inner["description"], schema["required"]) == ("Of the class.", ["town", "at"])


def told(schema: dict[str, Any]) -> dict[str, str]:
    return {name: of_field["description"] for name, of_field in schema["properties"].items()}
