"""Tests of every message: it is decoded as it was encoded, its exact bytes stay as other versions of Echo expect, and
hostile bytes are refused.
"""

from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from echo_shared.errors import CodecError
from echo_shared.wire.codec import decode_from_hub, decode_from_node, encode
from echo_shared.wire.messages import MAX_FRAME_BYTES, FromHub, FromNode
from tests.echo_shared.wire.messages.examples import FROM_HUB, FROM_NODE, LEASE, ROLLOUT, plain


@pytest.mark.parametrize("message", FROM_HUB, ids=lambda m: m.type)
def test_a_hubs_message_decodes_unchanged(message: FromHub) -> None:
    assert plain(decode_from_hub(encode(message))) == plain(message)


@pytest.mark.parametrize("message", FROM_NODE, ids=lambda m: m.type)
def test_a_nodes_message_decodes_unchanged(message: FromNode) -> None:
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
        "de0011a474797065a56c65617365a86c656173655f696409a867726f75705f696404a7696e6469636573920005aa70726f6d70745f69"
        "647383a56474797065a33c6934a573686170659103a464617461c40c010000000200000003000000a473656564cfffffffffffffffff"
        "ae706f6c6963795f76657273696f6e07ab74656d7065726174757265cb3fe0000000000000aa6d61785f746f6b656e7309a873746f70"
        "5f6964739101aa646561646c696e655f73cb404e000000000000a56f66666572c0a870726566697865739184a5696e64657805a36964"
        "7383a56474797065a33c6934a573686170659102a464617461c4080800000006000000a86c6f6770726f627383a56474797065a33c66"
        "34a573686170659102a464617461c408000000bf000000c0a876657273696f6e739282ae706f6c6963795f76657273696f6e06aa6e75"
        "6d5f746f6b656e730182ae706f6c6963795f76657273696f6e08aa6e756d5f746f6b656e7301ae6f6e5f6e65775f76657273696f6ea9"
        "696e74657272757074ae72657475726e735f726f75746573c2a96b6565705f6b657973c2a674656e616e74a0"
    ),
    "rollout": (
        "8ea474797065a7726f6c6c6f7574aa726f6c6c6f75745f6964a3332d35a86c656173655f696403a867726f75705f696404a5696e646578"
        "05b4706f6c6963795f76657273696f6e5f737461727406b2706f6c6963795f76657273696f6e5f656e6408ae636f6d706c6574696f6e5f"
        "69647383a56474797065a33c6934a573686170659102a464617461c4080800000001000000b16265686176696f725f6c6f6770726f6273"
        "83a56474797065a33c6634a573686170659102a464617461c408000000bf000080bead66696e6973685f726561736f6ea473746f70aa73"
        "616d706c696e675f73cb3fc0000000000000a6726f75746573c400a96e756d5f676976656e01a876657273696f6e739282ae706f6c6963"
        "795f76657273696f6e06aa6e756d5f746f6b656e730182ae706f6c6963795f76657273696f6e08aa6e756d5f746f6b656e7301"
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
        "a464617461c40178a768616e645f6f6ec403000000"
    ),
    "have": (
        "84a474797065a468617665a9696e666f5f68617368c4140000000000000000000000000000000000000000a6706965636573920007a677"
        "616e746564c2"
    ),
    "totals": (
        "8ca474797065a6746f74616c73b0747261696e65645f726f6c6c6f757473cd9a78ae747261696e65645f746f6b656e73ce004e6dc8b2"
        "6576616c75617465645f726f6c6c6f757473cd019cb1616e7377657265645f726f6c6c6f75747300af616e7377657265645f746f6b65"
        "6e7300a764726f707065649182a6726561736f6ea57374616c65a8726f6c6c6f75747307ae6f74686572735f636865636b656403a573"
        "68617265cb3fc0000000000000a472616e6b03aa6e756d5f72616e6b656439a470616765bc2f6c6561646572626f6172643f6e6f6465"
        "3d30313233343536373839"
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


def test_a_frame_that_is_too_large_is_refused_unread() -> None:
    with pytest.raises(CodecError, match="too large"):
        decode_from_hub(bytes(MAX_FRAME_BYTES + 1))


FRAMES = [encode(message) for message in [*FROM_HUB, *FROM_NODE]]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FRAMES), st.data())
def test_truncated_bytes_give_a_codec_error(frame: bytes, data: st.DataObject) -> None:
    cut = frame[: data.draw(st.integers(0, len(frame) - 1))]
    for decode in (decode_from_hub, decode_from_node):
        with pytest.raises(CodecError):
            decode(cut)


def survives(frame: bytes) -> None:
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
