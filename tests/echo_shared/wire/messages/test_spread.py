from typing import Any

import pytest

from echo_shared.errors import CodecError
from echo_shared.wire.codec import decode_from_hub, decode_from_node
from echo_shared.wire.messages import MAX_ADDRESSES, MAX_MESH, Fetched, Links, Meet, MeetWanted, PolicyPublished
from tests.echo_shared.wire.messages.examples import IN_MEMORY, OFFER, changed, plain

MEET = Meet(node_id="abc", addresses=(("203.0.113.7", 40_000),))
WANTED = MeetWanted(node_id="abc", port=40_000, sightings=("203.0.113.7 40000 90 ff",))


@pytest.mark.parametrize(
    "fields",
    [
        {"pid": 0},
        {"pid": -1},
        {"pid": 2**31},
        {"pid": "1/../self"},
        {"pid": ...},
        {"descriptor": -1},
        {"descriptor": 2**31},
        {"descriptor": True},
        {"name": "echo-"},
        {"name": "echo-" + "0" * 33},
        {"name": "echo-" + "0" * 31 + "\n"},
        {"name": "echo-" + "0" * 30 + "/."},
    ],
    ids=str,
)
def test_an_address_in_memory_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    offered = PolicyPublished(policy_version=3, offer=IN_MEMORY)
    with pytest.raises(CodecError):
        decode_from_hub(changed(offered, **{f"offer__shared_memory__{name}": new for name, new in fields.items()}))


def test_peers_that_know_nothing_of_shared_memory_are_understood() -> None:
    published = PolicyPublished(policy_version=3, offer=OFFER)
    assert plain(decode_from_hub(changed(published, offer__shared_memory=...))) == plain(published)
    fetched = Fetched(info_hash=bytes(20), policy_version=1, seconds=1.0, swarm_bytes=1, web_seed_bytes=0)
    assert plain(decode_from_node(changed(fetched, shared_memory_bytes=...))) == plain(fetched)


@pytest.mark.parametrize(
    "fields",
    [
        {"node_id": "../x"},
        {"addresses": [["203.0.113.7", 1_023]]},
        {"addresses": [["203.0.113.7", 65_536]]},
        {"addresses": [["203.0.113.7", "22222"]]},
        {"addresses": [["x" * 65, 40_000]]},
        {"addresses": [["203.0.113.7", 40_000]] * (MAX_ADDRESSES + 1)},
        {"addresses": [["203.0.113.7"]]},
        {"answers": 1},
    ],
    ids=str,
)
def test_a_meet_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    assert decode_from_hub(changed(MEET)) == MEET
    with pytest.raises(CodecError):
        decode_from_hub(changed(MEET, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"node_id": ""},
        {"port": 0},
        {"port": 1_023},
        {"port": 65_536},
        {"sightings": ["s"] * 3},
        {"sightings": ["s" * 201]},
        {"local_hosts": ["192.168.1.2"] * 5},
        {"local_hosts": ["x" * 65]},
        {"port": ...},
    ],
    ids=str,
)
def test_a_wanted_meet_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    assert decode_from_node(changed(WANTED)) == WANTED
    with pytest.raises(CodecError):
        decode_from_node(changed(WANTED, **fields))


def test_links_of_older_nodes_go_through_no_routers() -> None:
    links = Links(node_ids=("abc",), punched=("abc",))
    assert plain(decode_from_node(changed(links, punched=...)))["punched"] == ()
    with pytest.raises(CodecError):
        decode_from_node(changed(links, punched=["abc"] * (MAX_MESH + 1)))
