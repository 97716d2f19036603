from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from echo_shared.wire.messages.fields import InfoHash, RolloutId, Seed, TokenIds
from scripts.docs.field_types import default, in_words, models_in, number, of_field


class Kind(StrEnum):
    ONE = "one"


class Part(BaseModel):
    """A part."""


class Model(BaseModel):
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    scale: Annotated[float, Field(gt=0, lt=1)]
    mode: Literal["a", "b"] = "a"
    names: Annotated[tuple[Annotated[str, Field(max_length=9)], ...], Field(max_length=3)] = ()
    part: Part | None = None
    on: bool = False
    options: dict[str, Any] = Field(default_factory=dict)
    own: Part = Part()


@pytest.mark.parametrize(
    ("name", "words", "left_out"),
    [
        ("port", "integer, at least 0, at most 65,535", "`0`"),
        ("scale", "number, more than 0, less than 1", ""),
        ("mode", '`"a"` or `"b"`', '`"a"`'),
        ("names", "list of (text, at most 9 characters), at most 3 items", "`[]`"),
        ("part", "[Part](#part) or none", "`none`"),
        ("on", "true or false", "`false`"),
        ("options", "table of anything", "`{}`"),
        ("own", "[Part](#part)", "`its own defaults`"),
    ],
)
def test_a_field_in_words(name: str, words: str, left_out: str) -> None:
    field = Model.model_fields[name]
    assert (of_field(field), default(field)) == (words, left_out)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (InfoHash, "bytes, 20 bytes"),
        (Seed, "integer, at least 0, at most 2^64 - 1"),
        (TokenIds, "array of int32"),
        (RolloutId, "text, like `^[0-9]+-[0-9]+$`, 3 to 48 characters"),
    ],
)
def test_types_of_messages_in_words(kind: Any, words: str) -> None:
    assert in_words(kind) == words


def test_models_are_found_at_any_depth() -> None:
    kind = tuple[Annotated[Part, Field()], ...] | dict[str, Kind] | Literal["x"] | None
    assert set(models_in(kind)) == {Part, Kind}


def test_numbers_are_written_in_everyday_form() -> None:
    assert [number(bound) for bound in (2**53, 2**31, 1_000.0, 0.5, 2_000_001)] == [
        "2^53",
        "2^31",
        "1,000",
        "0.5",
        "2,000,001",
    ]
