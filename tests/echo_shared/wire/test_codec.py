"""The codec refuses frames that would cost far more to decode than their size suggests, and reads large honest ones."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest

from echo_shared.errors import CodecError, LocalProtocolError
from echo_shared.wire import codec
from echo_shared.wire.codec import MOST_FIELDS, SMALL_BYTES, check_codec, decode_from_hub, decode_from_node, encode
from echo_shared.wire.message_form import MapForm, form_of
from echo_shared.wire.messages import (
    MAX_BATCHED,
    MAX_FRAME_BYTES,
    MAX_FRAME_FROM_NODE_BYTES,
    MAX_PARTS_TOKENS,
    FromHub,
    FromNode,
    NodeStatus,
    Receipt,
    Receipts,
    ReceiptState,
    ReceiptsWanted,
    RolloutParts,
    fields,
    specimens,
)
from echo_shared.wire.messages.fields import MAX_TOKENS, pack_array
from tests.echo_shared.wire.messages.examples import FROM_HUB, FROM_NODE, MIXED, PARTS, plain

STATUS = NodeStatus(activity="waiting", capacity=16, policy_version=None, tokens_per_s=0.5)
EMPTY_LISTS = b"\x90"
EMPTY_MAPS = b"\x80"


def many(item: bytes, num_bytes: int = MAX_FRAME_BYTES - 1_000) -> bytes:
    assert len(item) == 1
    return b"\xdd" + num_bytes.to_bytes(4, "big") + item * num_bytes


def with_field(message: FromHub | FromNode, name: str, value: bytes) -> bytes:
    """Encode the message with this MessagePack value as the field `name`, known or unknown."""
    fields = msgpack.unpackb(encode(message))
    fields.pop(name, None)
    packed = [msgpack.packb(key) + msgpack.packb(each) for key, each in fields.items()]
    header: bytes = msgpack.Packer().pack_map_header(len(fields) + 1)
    return header + b"".join(packed) + msgpack.packb(name) + value


PADDING = msgpack.packb("x" * SMALL_BYTES)


@pytest.mark.parametrize("message", FROM_HUB, ids=lambda m: m.type)
def test_a_large_frame_of_a_newer_hub_is_read_like_a_small_one(message: FromHub) -> None:
    assert plain(decode_from_hub(with_field(message, "of_a_later_version", PADDING))) == plain(message)


@pytest.mark.parametrize("message", FROM_NODE, ids=lambda m: m.type)
def test_a_large_frame_of_a_newer_node_is_read_like_a_small_one(message: FromNode) -> None:
    assert plain(decode_from_node(with_field(message, "of_a_later_version", PADDING))) == plain(message)


def largest() -> list[FromHub | FromNode]:
    def of(count: int) -> dict[str, Any]:
        return {"ids": np.arange(count, dtype=np.int32), "logprobs": np.full(count, -1.0, np.float32)}

    ids = tuple(f"{2**53}-{index}" for index in range(MAX_BATCHED))
    long = np.arange(MAX_TOKENS, dtype=np.int32)
    return [
        MIXED.model_copy(update={"completion_ids": long, "behavior_logprobs": np.full(MAX_TOKENS, -1.0, np.float32)}),
        RolloutParts(
            parts=tuple(PARTS.parts[0].model_copy(update=of(MAX_PARTS_TOKENS // 1_024)) for _ in range(1_024))
        ),
        ReceiptsWanted(rollout_ids=ids),
        Receipts(receipts=tuple(Receipt(rollout_id=one, state=ReceiptState.TRAINED) for one in ids)),
    ]


@pytest.mark.parametrize("message", largest(), ids=lambda m: m.type)
def test_the_largest_messages_decode_unchanged(message: FromHub | FromNode) -> None:
    frame = encode(message)
    assert SMALL_BYTES < len(frame) < MAX_FRAME_FROM_NODE_BYTES / 1.5, (
        "the limit leaves space for a newer node's additions"
    )
    decoded = decode_from_hub(frame) if message.type == "receipts" else decode_from_node(frame)
    assert encode(decoded) == frame


def decode_frugally(frame: bytes) -> Any:
    """Decode the frame, and check that this takes little more memory than one copy of the frame."""
    # Load now what the first decoding loads, so that it is not measured. Hub and node also call check_codec at their
    # start.
    check_codec()
    tracemalloc.start()
    try:
        return decode_from_node(frame)
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < len(frame) + 200_000


@pytest.mark.parametrize("item", [EMPTY_LISTS, EMPTY_MAPS, b"\x00", b"\xc0"])
def test_an_unknown_fields_value_is_not_built(item: bytes) -> None:
    assert decode_frugally(with_field(STATUS, "bomb", many(item))) == STATUS


@pytest.mark.parametrize(
    "frame",
    [
        with_field(STATUS, "tokens_per_s", many(EMPTY_LISTS)),
        with_field(STATUS, "activity", many(EMPTY_MAPS)),
        with_field(STATUS, "type", many(EMPTY_LISTS)),
        with_field(ReceiptsWanted(rollout_ids=("3-5",)), "rollout_ids", many(EMPTY_LISTS)),
        with_field(ReceiptsWanted(rollout_ids=("3-5",)), "rollout_ids", b"\x91" + many(EMPTY_LISTS)),
        with_field(PARTS, "parts", b"\x91\x81\xa3ids" + many(EMPTY_LISTS)),
        with_field(PARTS, "parts", b"\x91\x81\xa3ids\x81\xa4data" + many(b"\x00")),
        with_field(MIXED, "completion_ids", many(EMPTY_LISTS)),
        with_field(MIXED, "versions", b"\x91" * (MAX_FRAME_BYTES - 1_000)),
        with_field(STATUS, "bomb", b"\x91" * (MAX_FRAME_BYTES - 1_000)),
        b"\x81" + many(EMPTY_LISTS) + b"\x00",
        many(EMPTY_LISTS),
        b"\xde" + (MOST_FIELDS + 1).to_bytes(2, "big") + b"\xa1x\x00" * (MOST_FIELDS + 1) + PADDING,
    ],
    ids=range(13),
)
def test_values_that_fit_no_field_are_refused_before_they_are_built(frame: bytes) -> None:
    with pytest.raises(CodecError):
        decode_frugally(frame)


@pytest.mark.parametrize(
    "change", [lambda frame: frame[:-1], lambda frame: frame + b"\x00", lambda frame: frame[:20_000]]
)
def test_a_large_frame_that_ends_too_soon_or_too_late_is_refused(change: Any) -> None:
    frame = change(encode(largest()[2]))
    with pytest.raises(CodecError, match="not MessagePack"):
        decode_from_node(frame)


def test_the_refusal_names_the_fields_and_the_value() -> None:
    with pytest.raises(CodecError) as refused:
        decode_from_node(with_field(STATUS, "capacity", many(EMPTY_LISTS)))
    assert "node_status.capacity: a list or a map" in str(refused.value)


@pytest.mark.parametrize("frame", [b"\xc6\x00\x01\x00\x00" + bytes(65_536), b"\xdb\x00\x01\x00\x00" + b"x" * 65_536])
def test_a_large_frame_that_is_no_map_is_refused(frame: bytes) -> None:
    with pytest.raises(CodecError, match="instead of a map"):
        decode_from_node(frame)


def test_this_installation_reads_its_own_messages() -> None:
    check_codec.__wrapped__()


@pytest.fixture
def misread_arrays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the decoder take each array for a plain value, as an incompatible numpy would."""
    monkeypatch.setattr(codec, "form_of", lambda kind: MapForm(dict.fromkeys(form_of(kind).fields)))
    check_codec.cache_clear()
    yield
    check_codec.cache_clear()


@pytest.mark.usefixtures("misread_arrays")
def test_a_broken_decoder_is_reported_as_a_local_error() -> None:
    with pytest.raises(LocalProtocolError, match="cannot read Echo's own messages") as raised:
        decode_from_node(encode(specimens.from_node()[0]))
    assert "lease.indices: a list or a map" in str(raised.value) and f"numpy {np.__version__}" in str(raised.value)


def test_an_encoder_that_packs_arrays_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A future numpy may name a type differently, which the check at the start must detect."""
    monkeypatch.setattr(fields, "pack_array", lambda array: {**pack_array(array), "dtype": "int32"})
    with pytest.raises(LocalProtocolError, match="cannot read Echo's own messages") as raised:
        check_codec.__wrapped__()
    assert "the array's dtype must be <i4" in str(raised.value)


@pytest.mark.usefixtures("misread_arrays")
def test_small_frames_are_read_while_large_ones_cannot_be() -> None:
    assert decode_from_node(encode(STATUS)) == STATUS


def test_an_unreadable_frame_is_the_peers_error() -> None:
    with pytest.raises(CodecError):
        decode_from_node(b"no message")
