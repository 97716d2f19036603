import msgpack
import pytest

from echo_shared.errors import CodecError
from echo_shared.wire.codec import decode_from_node
from echo_shared.wire.messages import Proof


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
