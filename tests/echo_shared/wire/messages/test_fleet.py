from __future__ import annotations

import pytest

from echo_shared.errors import CodecError
from echo_shared.wire.codec import decode_from_hub, decode_from_node
from echo_shared.wire.messages import MAX_FLEET
from tests.echo_shared.wire.messages.examples import COMMAND, FLEET, FLEET_WANTED, changed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("to", ["a"] * (MAX_FLEET + 1)),
        ("to", ["A"]),
        ("owner__owner_key", bytes(31)),
        ("command__body", bytes(1_025)),
        ("command__signature", b""),
        ("counts_once", 1),
    ],
)
def test_a_nodes_fleet_request_is_bounded(field: str, value: object) -> None:
    with pytest.raises(CodecError):
        decode_from_node(changed(FLEET_WANTED, **{field: value}))


def test_a_hubs_fleet_answer_is_bounded() -> None:
    with pytest.raises(CodecError):
        decode_from_hub(changed(FLEET, nodes=[FLEET.nodes[0].model_dump()] * (MAX_FLEET + 1)))
    with pytest.raises(CodecError):
        decode_from_hub(changed(COMMAND, body=bytes(1_025)))
