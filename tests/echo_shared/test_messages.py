"""The wire: round trips, golden bytes, bounds, and hostile bytes."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from echo_shared.codec import decode_from_hub, decode_from_node, encode
from echo_shared.errors import CodecError
from echo_shared.fields import MAX_TOKENS, pack_array, printable_line
from echo_shared.messages import (
    MAX_BATCHED,
    MAX_FRAME_BYTES,
    MAX_GROUP_SIZE,
    MAX_PARTS_TOKENS,
    MAX_PREFIX_TOKENS,
    MAX_VERSION_SPANS,
    ArtefactOffer,
    Challenge,
    DropReason,
    Fetched,
    FinishReason,
    FromHub,
    FromNode,
    Goodbye,
    Have,
    Hello,
    KeyframeWanted,
    KeysRotated,
    Lease,
    LeasedPrefix,
    LeaseReturned,
    LeaseRevoked,
    Links,
    Mesh,
    MeshPeer,
    NodeStatus,
    Peers,
    Piece,
    PolicyPublished,
    Proof,
    Receipt,
    Receipts,
    ReceiptState,
    ReceiptsWanted,
    Refused,
    Rollout,
    RolloutPart,
    RolloutParts,
    RunKey,
    SharedMemory,
    Standby,
    StandbyReason,
    Unwanted,
    VersionSpan,
    Welcome,
    rollout_id,
)

OFFER = ArtefactOffer(
    manifest=b"{}", signature=bytes(64), torrent=b"d1:ae", web_seed_path="/artefacts/", peers=(("10.0.0.1", 6881),)
)
IN_MEMORY = OFFER.model_copy(
    update={"shared_memory": SharedMemory(pid=4_321, descriptor=17, name=f"echo-{'0123456789abcdef' * 2}")}
)
LEASE = Lease(
    lease_id=3,
    group_id=4,
    indices=(0, 5),
    prompt_ids=np.array([1, 2, 3], np.int32),
    seed=2**64 - 1,
    policy_version=7,
    temperature=0.5,
    max_tokens=9,
    stop_ids=(1,),
    deadline_s=60.0,
)
ROLLOUT = Rollout(
    rollout_id="3-5",
    lease_id=3,
    group_id=4,
    index=5,
    policy_version_start=7,
    policy_version_end=7,
    completion_ids=np.array([8, 1], np.int32),
    behavior_logprobs=np.array([-0.5, -0.25], np.float32),
    finish_reason=FinishReason.STOP,
    sampling_s=0.125,
    num_given=1,
)
PREFIX = LeasedPrefix(index=5, ids=np.array([8, 6], np.int32), logprobs=np.array([-0.5, -2.0], np.float32))
VERSIONS = (VersionSpan(policy_version=6, num_tokens=1), VersionSpan(policy_version=8, num_tokens=1))
CONTINUED = LEASE.model_copy(
    update={
        "lease_id": 9,
        "prefixes": (PREFIX.model_copy(update={"versions": VERSIONS}),),
        "on_new_version": "interrupt",
    }
)
MIXED = ROLLOUT.model_copy(update={"policy_version_start": 6, "policy_version_end": 8, "versions": VERSIONS})
PARTS = RolloutParts(
    parts=(
        RolloutPart(
            lease_id=3,
            index=5,
            start=2,
            policy_version=7,
            ids=np.array([8, 1], np.int32),
            logprobs=np.array([-0.5, -0.25], np.float32),
        ),
        RolloutPart(
            lease_id=4,
            index=0,
            start=0,
            policy_version=2**31 - 1,
            ids=np.zeros(0, np.int32),
            logprobs=np.zeros(0, np.float32),
        ),
    )
)
FROM_HUB: list[FromHub] = [
    Challenge(protocol_version=2, software_version="1", hub_key=bytes(32), nonce=bytes(32), signature=bytes(64)),
    Welcome(
        run_id="r",
        run_name="n",
        node_id="id",
        base=OFFER,
        policy=None,
        policy_version=0,
        tracker_path="/announce/k",
        heartbeat_s=5.0,
        run_keys=(RunKey(key_id=1, key=bytes(32)),),
        mesh=(MeshPeer(node_id="abc", host="10.0.0.1", port=7_000),),
    ),
    Refused(code="bad_token", what="No."),
    PolicyPublished(policy_version=3, offer=IN_MEMORY),
    Peers(info_hash=bytes(20), peers=(("::1", 1), ("host", 65_535))),
    KeysRotated(run_keys=(RunKey(key_id=2, key=bytes(32)),)),
    Mesh(peers=(MeshPeer(node_id="abc", host="host", port=65_535),)),
    Piece(info_hash=bytes(20), index=2**20 - 1, data=b"x", hand_on=True),
    Unwanted(info_hashes=(bytes(20), b"a" * 20)),
    LEASE,
    CONTINUED,
    Standby(reason=StandbyReason.CHEAPER_NODES_SUFFICE, detail="They return 1.15 times what it takes."),
    Standby(reason=None),
    LeaseRevoked(lease_id=1, reason=DropReason.STALE),
    Receipts(receipts=(Receipt(rollout_id="3-5", state=ReceiptState.DROPPED, drop_reason=DropReason.STALE),)),
]
FROM_NODE: list[FromNode] = [
    Hello(protocol_version=2, software_version="1", node_key=bytes(32), nonce=bytes(32)),
    Proof(signature=bytes(64), name="n", invite_token=None, backend="b", device="d", swarm_port=1, mesh_port=2),
    Proof(signature=bytes(64), name="n", backend="b", device="d", cost_per_hour=0.4, power_watts=220),
    NodeStatus(activity="waiting", capacity=16, policy_version=None, tokens_per_s=0.0),
    Fetched(
        info_hash=bytes(20), policy_version=None, seconds=1.5, swarm_bytes=1, web_seed_bytes=2, shared_memory_bytes=3
    ),
    Have(info_hash=bytes(20), pieces=(0, 7), wanted=False),
    Links(node_ids=("abc", "0")),
    KeyframeWanted(policy_version=4),
    ROLLOUT,
    MIXED,
    PARTS,
    LeaseReturned(lease_id=1, indices=(0, 1), reason="full"),
    ReceiptsWanted(rollout_ids=("3-5", "3-0")),
    Goodbye(),
]


def plain(message: Any) -> Any:
    return message.model_dump(mode="python")


@pytest.mark.parametrize("message", FROM_HUB, ids=lambda m: m.type)
def test_what_a_hub_says_comes_back_the_same(message: FromHub) -> None:
    assert plain(decode_from_hub(encode(message))) == plain(message)


@pytest.mark.parametrize("message", FROM_NODE, ids=lambda m: m.type)
def test_what_a_node_says_comes_back_the_same(message: FromNode) -> None:
    assert plain(decode_from_node(encode(message))) == plain(message)


@pytest.mark.parametrize("message", FROM_HUB, ids=lambda m: m.type)
def test_neither_side_takes_the_others_words(message: FromHub) -> None:
    with pytest.raises(CodecError):
        decode_from_node(encode(message))


GOLDEN = {
    "hello": (
        "85a474797065a568656c6c6fb070726f746f636f6c5f76657273696f6e02b0736f6674776172655f76657273696f6ea131a86e6f64655f"
        "6b6579c4200000000000000000000000000000000000000000000000000000000000000000a56e6f6e6365c42000000000000000000000"
        "00000000000000000000000000000000000000000000"
    ),
    "lease": (
        "8ea474797065a56c65617365a86c656173655f696409a867726f75705f696404a7696e6469636573920005aa70726f6d70745f69647383"
        "a56474797065a33c6934a573686170659103a464617461c40c010000000200000003000000a473656564cfffffffffffffffffae706f6c"
        "6963795f76657273696f6e07ab74656d7065726174757265cb3fe0000000000000aa6d61785f746f6b656e7309a873746f705f69647391"
        "01aa646561646c696e655f73cb404e000000000000a56f66666572c0a870726566697865739184a5696e64657805a369647383a5647479"
        "7065a33c6934a573686170659102a464617461c4080800000006000000a86c6f6770726f627383a56474797065a33c6634a57368617065"
        "9102a464617461c408000000bf000000c0a876657273696f6e739282ae706f6c6963795f76657273696f6e06aa6e756d5f746f6b656e73"
        "0182ae706f6c6963795f76657273696f6e08aa6e756d5f746f6b656e7301ae6f6e5f6e65775f76657273696f6ea9696e74657272757074"
    ),
    "rollout": (
        "8da474797065a7726f6c6c6f7574aa726f6c6c6f75745f6964a3332d35a86c656173655f696403a867726f75705f696404a5696e646578"
        "05b4706f6c6963795f76657273696f6e5f737461727406b2706f6c6963795f76657273696f6e5f656e6408ae636f6d706c6574696f6e5f"
        "69647383a56474797065a33c6934a573686170659102a464617461c4080800000001000000b16265686176696f725f6c6f6770726f6273"
        "83a56474797065a33c6634a573686170659102a464617461c408000000bf000080bead66696e6973685f726561736f6ea473746f70aa73"
        "616d706c696e675f73cb3fc0000000000000a96e756d5f676976656e01a876657273696f6e739282ae706f6c6963795f76657273696f6e"
        "06aa6e756d5f746f6b656e730182ae706f6c6963795f76657273696f6e08aa6e756d5f746f6b656e7301"
    ),
    "rollout_parts": (
        "82a474797065ad726f6c6c6f75745f7061727473a570617274739286a86c656173655f696403a5696e64657805a5737461727402ae706f"
        "6c6963795f76657273696f6e07a369647383a56474797065a33c6934a573686170659102a464617461c4080800000001000000a86c6f67"
        "70726f627383a56474797065a33c6634a573686170659102a464617461c408000000bf000080be86a86c656173655f696404a5696e6465"
        "7800a5737461727400ae706f6c6963795f76657273696f6ece7fffffffa369647383a56474797065a33c6934a573686170659100a46461"
        "7461c400a86c6f6770726f627383a56474797065a33c6634a573686170659100a464617461c400"
    ),
    "receipts_wanted": ("82a474797065af72656365697074735f77616e746564ab726f6c6c6f75745f69647392a3332d35a3332d30"),
    "policy_published": (
        "83a474797065b0706f6c6963795f7075626c6973686564ae706f6c6963795f76657273696f6e03a56f6666657288a86d616e6966657374"
        "c4027b7da97369676e6174757265c440000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "00000000000000000000000000000000000000000000000000a7746f7272656e74c40564313a6165ad7765625f736565645f70617468ab"
        "2f6172746566616374732fa3776179a5737761726dac64656c74615f706172656e74c0a570656572739192a831302e302e302e31cd1ae1"
        "ad7368617265645f6d656d6f727983a3706964cd10e1aa64657363726970746f7211a46e616d65d9256563686f2d303132333435363738"
        "3961626364656630313233343536373839616263646566"
    ),
    "fetched": (
        "8aa474797065a766657463686564a9696e666f5f68617368c4140000000000000000000000000000000000000000ae706f6c6963795f76"
        "657273696f6ec0a77365636f6e6473cb3ff8000000000000ab737761726d5f627974657301ae7765625f736565645f627974657302b373"
        "68617265645f6d656d6f72795f627974657303ac7075736865645f627974657300aa6d6573685f627974657300af6d6f64656c5f687562"
        "5f627974657300"
    ),
    "piece": (
        "85a474797065a57069656365a9696e666f5f68617368c4140000000000000000000000000000000000000000a5696e646578ce000fffff"
        "a464617461c40178a768616e645f6f6ec3"
    ),
    "have": (
        "84a474797065a468617665a9696e666f5f68617368c4140000000000000000000000000000000000000000a6706965636573920007a677"
        "616e746564c2"
    ),
    "goodbye": "82a474797065a7676f6f64627965a6726561736f6ea0",
}


@pytest.mark.parametrize(
    "message",
    [m for m in [*FROM_HUB, *FROM_NODE] if m.type in GOLDEN and m is not LEASE and m is not ROLLOUT],
    ids=lambda m: m.type,
)
def test_the_bytes_on_the_wire_never_change(message: FromHub | FromNode) -> None:
    assert encode(message).hex() == GOLDEN[message.type]


def changed(message: FromHub | FromNode, **fields: Any) -> bytes:
    value = msgpack.unpackb(encode(message))
    for path, new in fields.items():
        target = value
        *parents, last = path.split("__")
        for part in parents:
            target = target[part]
        if new is ...:
            del target[last]
        else:
            target[last] = new
    packed: bytes = msgpack.packb(value)
    return packed


def array(values: list[float], dtype: str) -> dict[str, Any]:
    return pack_array(np.array(values, dtype))


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 2**64 - 1, "lease_id": -1},
        {"lease_id": 2**53 + 1},
        {"lease_id": "3"},
        {"lease_id": 3.0},
        {"lease_id": True},
        {"lease_id": ...},
        {"indices": []},
        {"indices": [0] * 1_025},
        {"indices": [-1]},
        {"indices": {"0": 1}},
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"max_tokens": 0},
        {"max_tokens": MAX_TOKENS + 1},
        {"policy_version": -1},
        {"deadline_s": 0},
        {"prompt_ids": [1, 2]},
        {"prompt_ids": array([1], "<i8")},
        {"prompt_ids": array([1], "<f4")},
        {"prompt_ids__dtype": "|O"},
        {"prompt_ids__shape": [4]},
        {"prompt_ids__shape": [-3]},
        {"prompt_ids__shape": [True, 3]},
        {"prompt_ids__shape": [3, 1]},
        {"prompt_ids__data": b"\x00"},
        {"prompt_ids__data": ...},
        {"prompt_ids": array([0] * (MAX_TOKENS + 1), "<i4")},
        {"type": "no_such_message"},
        {"type": 3},
        {"type": ...},
    ],
    ids=str,
)
def test_a_lease_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CodecError):
        decode_from_hub(changed(LEASE, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"behavior_logprobs": array([float("nan"), 0], "<f4")},
        {"behavior_logprobs": array([float("inf"), 0], "<f4")},
        {"rollout_id": "3"},
        {"rollout_id": "٣-5"},
        {"rollout_id": "3-5\n"},
        {"rollout_id": "1-" + "9" * 60},
        {"finish_reason": "tired"},
        {"sampling_s": -1.0},
        {"num_given": -1},
        {"num_given": 1.0},
        {"versions": [{"policy_version": 2**31, "num_tokens": 1}]},
        {"versions": [{"policy_version": 1, "num_tokens": 0}]},
        {"versions": [{"policy_version": 1, "num_tokens": 1}] * (MAX_VERSION_SPANS + 1)},
        {"versions": None},
    ],
    ids=str,
)
def test_a_rollout_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CodecError):
        decode_from_node(changed(ROLLOUT, **fields))


def part(tokens: int, **fields: Any) -> dict[str, Any]:
    arrays = {"ids": array([0] * tokens, "<i4"), "logprobs": array([0] * tokens, "<f4")}
    return {"lease_id": 1, "index": 0, "start": 0, "policy_version": 0, **arrays, **fields}


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [part(1)] * (MAX_GROUP_SIZE + 1),
        [part(MAX_PARTS_TOKENS), part(1)],
        [part(1, start=-1)],
        [part(1, start=MAX_TOKENS)],
        [part(1, lease_id=-1)],
        [part(1, policy_version=-1)],
        [part(1, index="0")],
        [part(1, logprobs=array([float("inf")], "<f4"))],
        [part(1, ids=array([1], "<i8"))],
        [{"lease_id": 1}],
        [1],
        part(1),
    ],
    ids=lambda parts: str(parts)[:40],
)
def test_parts_out_of_bounds_are_refused(parts: Any) -> None:
    with pytest.raises(CodecError):
        decode_from_node(changed(PARTS, parts=parts))


def test_the_largest_messages_of_parts_and_prefixes_fit_into_a_frame() -> None:
    few = MAX_PARTS_TOKENS // MAX_GROUP_SIZE
    decode_from_node(changed(PARTS, parts=[part(few)] * MAX_GROUP_SIZE))
    many = [part(MAX_PREFIX_TOKENS // 4, index=index) for index in range(4)]
    largest = changed(CONTINUED, prefixes=many, prompt_ids=array([0] * MAX_TOKENS, "<i4"))
    decode_from_hub(largest)
    assert len(largest) < MAX_FRAME_BYTES / 2


@pytest.mark.parametrize(
    "prefixes",
    [
        [part(1)] * (MAX_GROUP_SIZE + 1),
        [part(MAX_PREFIX_TOKENS // 2), part(MAX_PREFIX_TOKENS // 2), part(1)],
        [part(1, index=-1)],
        [part(1, logprobs=array([float("nan")], "<f4"))],
        [part(3, versions=[{"policy_version": 1, "num_tokens": 2}])],
        [part(3, versions=[{"policy_version": 1, "num_tokens": 3}, {"policy_version": 2, "num_tokens": 0}])],
        [part(3, versions=[{"policy_version": -1, "num_tokens": 3}])],
        [part(MAX_VERSION_SPANS + 1, versions=[{"policy_version": 1, "num_tokens": 1}] * (MAX_VERSION_SPANS + 1))],
        [{"index": 1}],
        None,
    ],
    ids=lambda prefixes: str(prefixes)[:40],
)
def test_prefixes_out_of_bounds_are_refused(prefixes: Any) -> None:
    with pytest.raises(CodecError):
        decode_from_hub(changed(CONTINUED, prefixes=prefixes))


@pytest.mark.parametrize(
    "ids", [[], ["3-5"] * (MAX_BATCHED + 1), ["3"], [3], "3-5", ["3-5", "1-" + "9" * 60]], ids=lambda ids: str(ids)[:20]
)
def test_receipts_wanted_out_of_bounds_are_refused(ids: Any) -> None:
    with pytest.raises(CodecError):
        decode_from_node(changed(ReceiptsWanted(rollout_ids=("3-5",)), rollout_ids=ids))


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


def test_fields_that_a_newer_peer_adds_are_ignored() -> None:
    assert plain(decode_from_node(changed(ROLLOUT, colour="blue"))) == plain(ROLLOUT)


def test_a_frame_that_is_too_large_is_refused_unread() -> None:
    with pytest.raises(CodecError, match="too large"):
        decode_from_hub(bytes(MAX_FRAME_BYTES + 1))


def test_an_error_says_where() -> None:
    with pytest.raises(CodecError, match="temperature"):
        decode_from_hub(changed(LEASE, temperature=-1.0))


def test_control_characters_of_a_peer_never_reach_a_terminal() -> None:
    refused = decode_from_hub(changed(Refused(code="x", what="No."), what="\x1b[2Jcleared\nline"))
    assert isinstance(refused, Refused)
    assert refused.what == "?[2Jcleared\nline"
    refused = decode_from_hub(changed(refused, what="\u202eback\u2066\u200b\u2028\tend", code="a\nb\tc\x9b"))
    assert isinstance(refused, Refused)
    assert (refused.what, refused.code) == ("?back???\tend", "a?b?c?")
    assert printable_line("\ud800\r\nÄ 字 🙂") == "???Ä 字 🙂"


def test_rollouts_are_named_by_lease_and_index() -> None:
    assert rollout_id(12, 3) == "12-3"


FRAMES = [encode(message) for message in [*FROM_HUB, *FROM_NODE]]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FRAMES), st.data())
def test_truncated_bytes_give_a_codec_error(frame: bytes, data: st.DataObject) -> None:
    cut = frame[: data.draw(st.integers(0, len(frame) - 1))]
    for decode in (decode_from_hub, decode_from_node):
        with pytest.raises(CodecError):
            decode(cut)


def survives(frame: bytes) -> None:
    """Decodes, or gives CodecError; nothing else."""
    for decode in (decode_from_hub, decode_from_node):
        try:
            decode(frame)
        except CodecError:
            continue


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(FRAMES), st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8)
)
def test_changed_bytes_give_a_message_or_a_codec_error(frame: bytes, changes: list[tuple[int, int]]) -> None:
    hostile = bytearray(frame)
    for position, value in changes:
        hostile[position % len(hostile)] = value
    survives(bytes(hostile))


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=300))
@example(b"\x81\xa4type\xc7\x00\x00")
@example(b"\xd7\xff" + b"\xff" * 8)
@example(b"\xc7\x0c\xff" + b"\xff" * 12)
@example(b"\x91" * 2_000)
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xdd\x7f\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\x81\xa4type\xa5lease\x00")
@example(b"\x82\xa4type\xa5lease\xa4type\xa5lease")
def test_arbitrary_bytes_give_a_codec_error(frame: bytes) -> None:
    survives(frame)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=8), st.binary(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from([*FROM_HUB, *FROM_NODE]), st.data())
def test_any_value_in_any_field_gives_a_message_or_a_codec_error(message: Any, data: st.DataObject) -> None:
    value = msgpack.unpackb(encode(message))
    field = data.draw(st.sampled_from(sorted(value)))
    value[field] = data.draw(VALUES)
    survives(msgpack.packb(value))


@pytest.mark.parametrize("cost", [-1e-9, -1.0, float("nan"), float("inf"), 1_000.1, 1e300, "1", None, True])
@pytest.mark.parametrize("field", ["cost_per_hour", "power_watts"])
def test_no_node_claims_a_cost_beyond_all_sense(field: str, cost: object) -> None:
    most = {"cost_per_hour": 1.0, "power_watts": 100.0}[field]
    frame = msgpack.packb(
        {
            **Proof(signature=bytes(64), name="n", backend="b", device="d").model_dump(),
            field: cost * most if type(cost) is float else cost,
        }
    )
    with pytest.raises(CodecError):
        decode_from_node(frame)
