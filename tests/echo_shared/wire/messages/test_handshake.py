import msgpack
import pytest

from echo_shared.errors import CodecError
from echo_shared.wire.codec import decode_from_hub, decode_from_node, encode
from echo_shared.wire.messages import Proof, Welcome
from tests.echo_shared.wire.messages.examples import FROM_HUB


@pytest.mark.parametrize("cost", [-1e-9, -1.0, float("nan"), float("inf"), 1_000.1, 1e300, "1", None, True])
@pytest.mark.parametrize("field", ["cost_per_hour", "power_watts"])
def test_no_node_claims_a_cost_beyond_all_sense(field: str, cost: object) -> None:
    most = {"cost_per_hour": 1.0, "power_watts": 100.0}[field]
    frame = msgpack.packb(
        {
            **Proof(signature=bytes(64), name="n", backend="torch", device="d").model_dump(),
            field: cost * most if type(cost) is float else cost,
        }
    )
    with pytest.raises(CodecError):
        decode_from_node(frame)


def test_a_hub_without_the_offer_of_a_gguf_file_is_understood() -> None:
    welcome = next(message for message in FROM_HUB if isinstance(message, Welcome))
    fields = msgpack.unpackb(encode(welcome.model_copy(update={"gguf": welcome.base})))
    told = decode_from_hub(msgpack.packb(fields))
    assert isinstance(told, Welcome) and told.gguf == welcome.base
    del fields["gguf"]
    older = decode_from_hub(msgpack.packb(fields))
    assert isinstance(older, Welcome) and older.gguf is None and older.base == welcome.base
