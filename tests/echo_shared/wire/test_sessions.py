"""Both ends of a session (hub and node), connected in memory: the handshake, every refusal, and every message at a
wrong time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_shared.errors import CodecError, EchoError, LocalProtocolError, RefusedError, RemoteProtocolError
from echo_shared.signing.identity import Identity
from echo_shared.wire import sessions
from echo_shared.wire.codec import encode
from echo_shared.wire.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    ArtefactOffer,
    Challenge,
    Goodbye,
    Hello,
    LeaseReturned,
    NodeStatus,
    Peers,
    Proof,
    Refused,
    RunKey,
    Welcome,
)
from echo_shared.wire.sessions import HUB_MAY_RECEIVE, NODE_MAY_RECEIVE, HubSession, NodeSession, SessionState

NODE, HUB, OTHER = Identity.generate(), Identity.generate(), Identity.generate()
OFFER = ArtefactOffer(manifest=b"{}", signature=bytes(64), torrent=b"", web_seed_path="/a/")
WELCOME = Welcome(
    run_id="r",
    run_name="n",
    node_id="id",
    base=OFFER,
    policy=None,
    policy_version=0,
    tracker_path="/announce/k",
    heartbeat_s=5.0,
    run_keys=(RunKey(key_id=1, key=bytes(32)),),
)
STATUS = NodeStatus(activity="waiting", capacity=0, policy_version=None, tokens_per_s=0.0)
PEERS = Peers(info_hash=bytes(20), peers=())


@dataclass
class Pair:
    pinned: bytes | None = None
    node: NodeSession = field(init=False)
    hub: HubSession = field(init=False)

    def __post_init__(self) -> None:
        self.node = NodeSession(me=NODE, pinned_hub_key=self.pinned, software_version="n1", nonce=b"n" * 32)
        self.hub = HubSession(me=HUB, software_version="h1", nonce=b"h" * 32)

    def challenged(self) -> "Pair":
        self.hub.receive(self.node.hello())
        return self

    def proven(self) -> "Pair":
        self.challenged()
        self.node.receive(self.hub.challenge())
        return self

    def opened(self) -> "Pair":
        self.proven()
        self.hub.receive(self.proof())
        self.node.receive(self.hub.welcome(WELCOME))
        return self

    def proof(self) -> bytes:
        return self.node.proof(name="n", invite_token="t", backend="torch", device="d", swarm_port=1)


def altered(frame: bytes, **fields: Any) -> bytes:
    packed: bytes = msgpack.packb({**msgpack.unpackb(frame), **fields})
    return packed


def test_the_handshake_opens_both_ends_and_proves_their_keys() -> None:
    pair = Pair().opened()
    assert (pair.node.state, pair.hub.state) == (SessionState.OPEN, SessionState.OPEN)
    assert pair.node.hub_key == HUB.public_key
    assert pair.hub.node_id == NODE.node_id
    assert pair.hub.proof is not None and pair.hub.proof.invite_token == "t"
    assert pair.hub.receive(pair.node.send(STATUS)) == STATUS
    assert pair.node.receive(pair.hub.send(PEERS)) == PEERS


def test_a_known_hub_is_accepted_and_a_changed_key_is_not() -> None:
    assert Pair(pinned=HUB.public_key).opened().node.state is SessionState.OPEN
    pair = Pair(pinned=OTHER.public_key).challenged()
    with pytest.raises(RefusedError, match="differs from the one that this node has stored") as caught:
        pair.node.receive(pair.hub.challenge())
    assert caught.value.code == "hub_key_changed"
    assert pair.node.hub_key is None
    with pytest.raises(LocalProtocolError):
        pair.proof()


@pytest.mark.parametrize(
    ("version", "advice"), [(OLDEST_PROTOCOL_VERSION - 1, "Upgrade the node"), (PROTOCOL_VERSION + 1, "operator")]
)
def test_the_hub_refuses_an_unknown_version_and_names_the_end_to_upgrade(version: int, advice: str) -> None:
    pair = Pair()
    with pytest.raises(RefusedError) as caught:
        pair.hub.receive(altered(pair.node.hello(), protocol_version=version))
    assert caught.value.code == "protocol_version" and advice in (caught.value.do or "")
    refused = pair.node.receive(pair.hub.refuse(caught.value.code, caught.value.what, caught.value.do or ""))
    assert isinstance(refused, Refused) and refused.code == "protocol_version"
    assert (pair.node.state, pair.hub.state) == (SessionState.CLOSED, SessionState.CLOSED)


@pytest.mark.parametrize(
    ("version", "advice"), [(OLDEST_PROTOCOL_VERSION - 1, "operator"), (PROTOCOL_VERSION + 1, "Upgrade the node")]
)
def test_the_node_refuses_an_unknown_version_and_names_the_end_to_upgrade(version: int, advice: str) -> None:
    pair = Pair().challenged()
    with pytest.raises(RefusedError) as caught:
        pair.node.receive(altered(pair.hub.challenge(), protocol_version=version))
    assert caught.value.code == "protocol_version" and advice in (caught.value.do or "")


def test_a_hub_without_the_private_key_is_refused() -> None:
    pair = Pair().challenged()
    for fields in ({"hub_key": OTHER.public_key}, {"signature": bytes(64)}, {"nonce": b"x" * 32}):
        with pytest.raises(RemoteProtocolError, match="could not prove"):
            pair.node.receive(altered(pair.hub.challenge(), **fields))


def test_a_node_without_the_private_key_is_refused() -> None:
    pair = Pair().proven()
    with pytest.raises(RefusedError) as caught:
        pair.hub.receive(altered(pair.proof(), signature=bytes(64)))
    assert caught.value.code == "bad_signature"
    assert pair.hub.proof is None and pair.hub.state is not SessionState.OPEN


def test_a_signature_from_another_handshake_is_refused() -> None:
    recorded = Pair().proven().proof()
    pair = Pair()
    pair.hub = HubSession(me=HUB, software_version="h1", nonce=b"another nonce".ljust(32))
    with pytest.raises(RefusedError):
        pair.proven().hub.receive(recorded)


def test_a_hub_cannot_pass_a_nodes_proof_on_to_another_hub() -> None:
    """The hub OTHER gets the node's proof and passes it on to HUB, posing as the node. The proof is valid for OTHER
    only.
    """
    middle = HubSession(me=OTHER, software_version="x", nonce=b"h" * 32)
    node = NodeSession(me=NODE, pinned_hub_key=None, software_version="n1", nonce=b"n" * 32)
    hello = node.hello()
    middle.receive(hello)
    node.receive(middle.challenge())
    hub = HubSession(me=HUB, software_version="h1", nonce=b"h" * 32)
    hub.receive(hello)
    with pytest.raises(RefusedError):
        hub.receive(node.proof(name="n", invite_token=None, backend="torch", device="d", swarm_port=0))


STAGES: list[Callable[[], Pair]] = [Pair, lambda: Pair().challenged(), lambda: Pair().proven(), lambda: Pair().opened()]
FROM_NODE = [
    Hello(protocol_version=1, software_version="1", node_key=NODE.public_key, nonce=bytes(32)),
    Proof(signature=bytes(64), name="n", backend="torch", device="d"),
    STATUS,
    LeaseReturned(lease_id=1, indices=(0,), reason=""),
    Goodbye(),
]
FROM_HUB = [
    Challenge(protocol_version=1, software_version="1", hub_key=HUB.public_key, nonce=bytes(32), signature=bytes(64)),
    WELCOME,
    PEERS,
    Refused(code="x", what="y"),
]


@pytest.mark.parametrize("stage", range(len(STAGES)))
@pytest.mark.parametrize("message", FROM_NODE, ids=lambda m: m.type)
def test_a_hub_takes_nothing_out_of_turn(stage: int, message: Any) -> None:
    hub = STAGES[stage]().hub
    before = hub.state
    if type(message) in HUB_MAY_RECEIVE[before]:
        return
    with pytest.raises(RemoteProtocolError, match="out of turn"):
        hub.receive(encode(message))
    assert hub.state is before


@pytest.mark.parametrize("stage", range(len(STAGES)))
@pytest.mark.parametrize("message", FROM_HUB, ids=lambda m: m.type)
def test_a_node_takes_nothing_out_of_turn(stage: int, message: Any) -> None:
    node = STAGES[stage]().node
    before = node.state
    if type(message) in NODE_MAY_RECEIVE[before]:
        return
    with pytest.raises(RemoteProtocolError, match="out of turn"):
        node.receive(encode(message))
    assert node.state is before


def test_no_end_sends_out_of_turn() -> None:
    pair = Pair()
    for call in (pair.proof, lambda: pair.node.send(STATUS), pair.hub.challenge, lambda: pair.hub.welcome(WELCOME)):
        with pytest.raises(LocalProtocolError):
            call()
    with pytest.raises(LocalProtocolError):
        _ = pair.hub.node_id
    pair.opened()
    for call in (pair.node.hello, pair.proof, pair.hub.challenge, lambda: pair.hub.welcome(WELCOME)):
        with pytest.raises(LocalProtocolError):
            call()
    with pytest.raises(LocalProtocolError):
        pair.node.send(FROM_NODE[0])  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError):
        pair.hub.send(WELCOME)


def test_a_goodbye_is_the_last_word_on_both_ends() -> None:
    pair = Pair().opened()
    assert isinstance(pair.hub.receive(pair.node.send(Goodbye())), Goodbye)
    assert (pair.node.state, pair.hub.state) == (SessionState.CLOSED, SessionState.CLOSED)
    with pytest.raises(LocalProtocolError):
        pair.node.send(STATUS)
    with pytest.raises(RemoteProtocolError):
        pair.hub.receive(encode(STATUS))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_refusal_is_understood_at_any_moment(stage: int) -> None:
    pair = STAGES[stage]()
    assert isinstance(pair.node.receive(pair.hub.refuse("shutting_down", "Later.")), Refused)
    assert (pair.node.state, pair.hub.state) == (SessionState.CLOSED, SessionState.CLOSED)


def test_every_state_is_in_both_tables() -> None:
    assert set(NODE_MAY_RECEIVE) == set(HUB_MAY_RECEIVE) == set(SessionState)
    assert range(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION + 1) == sessions.SUPPORTED_VERSIONS


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(range(4)), st.binary(max_size=200))
def test_hostile_bytes_give_a_protocol_error_and_leave_the_state(stage: int, frame: bytes) -> None:
    pair = STAGES[stage]()
    for end in (pair.node, pair.hub):
        before = end.state
        with pytest.raises(CodecError):
            end.receive(frame)
        assert end.state is before


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(range(4)), st.sampled_from([*FROM_NODE, *FROM_HUB]), st.integers(0, 500), st.integers(0, 255))
def test_damaged_messages_never_open_a_session(stage: int, message: Any, position: int, value: int) -> None:
    frame = bytearray(encode(message))
    frame[position % len(frame)] = value
    pair = STAGES[stage]()
    for end in (pair.node, pair.hub):
        before = end.state
        try:
            end.receive(bytes(frame))
        except EchoError:
            assert end.state is before
        else:
            assert end.state is not SessionState.OPEN or before in (SessionState.OPEN, SessionState.PROVEN)
