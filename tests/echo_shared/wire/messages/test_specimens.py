"""The specimens are messages with which an installation tests its codec. Together they must contain every array
field.
"""

from typing import get_args

import pytest

from echo_shared.wire.codec import SMALL_BYTES, encode
from echo_shared.wire.messages import FromHub, FromNode, WireMessage, specimens


def holds_array(kind: type[WireMessage]) -> bool:
    return '"dtype"' in str(kind.model_json_schema()).replace("'", '"')


@pytest.mark.parametrize(("made", "union"), [(specimens.from_hub, FromHub), (specimens.from_node, FromNode)])
def test_every_message_with_arrays_has_a_specimen(made: object, union: object) -> None:
    assert callable(made)
    kinds = {type(message) for message in made()}
    assert kinds == {kind for kind in get_args(union) if holds_array(kind)}


@pytest.mark.parametrize("message", [*specimens.from_hub(), *specimens.from_node()], ids=lambda m: m.type)
def test_each_is_read_field_by_field(message: FromHub | FromNode) -> None:
    assert len(encode(message)) > SMALL_BYTES
