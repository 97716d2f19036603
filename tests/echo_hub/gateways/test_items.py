from __future__ import annotations

import msgpack

from echo_hub.gateways.items import node_fields, node_of, refusal_item, refusal_of, rollout_item, rollout_of
from echo_hub.net.gateway import NodeInfo
from echo_shared.errors import RefusedError
from echo_shared.wire.messages import RefusalCode, Rollout, VersionSpan
from tests.echo_hub.gateways.world import rollout


def travelled(value: object) -> object:
    return msgpack.unpackb(msgpack.packb(value), strict_map_key=False)


def test_a_rollout_arrives_as_it_was_sent_in_every_field() -> None:
    spans = (VersionSpan(policy_version=3, num_tokens=1), VersionSpan(policy_version=4, num_tokens=2))
    sent = rollout(5).model_copy(
        update={"versions": spans, "num_given": 1, "policy_version_start": 3, "policy_version_end": 4}
    )
    item = travelled(rollout_item("node", 17, sent))
    assert isinstance(item, list) and item[1:3] == ["node", 17]
    arrived = rollout_of(item)
    assert set(arrived.__dict__) == set(Rollout.model_fields)
    for name in Rollout.model_fields:
        one, other = getattr(arrived, name), getattr(sent, name)
        if hasattr(other, "dtype"):
            assert one.dtype == other.dtype and one.tolist() == other.tolist()
        else:
            assert (one, type(one)) == (other, type(other))


def test_a_node_and_a_refusal_arrive_unchanged() -> None:
    node = NodeInfo(
        node_id="n",
        public_key=bytes(32),
        name="name",
        backend="torch",
        device="cpu",
        host="127.0.0.1",
        hub_host="hub",
        swarm_port=1,
        mesh_port=2,
        invite_id=None,
    )
    fields = travelled(node_fields(node))
    assert isinstance(fields, dict) and node_of(fields) == node
    refused = RefusedError("No.", got="this", do="that", code=RefusalCode.BANNED)
    item = travelled(refusal_item(3, refused))
    assert isinstance(item, list) and item[1] == 3
    again = refusal_of(item)
    assert (again.what, again.got, again.do, again.code) == ("No.", "this", "that", RefusalCode.BANNED)
