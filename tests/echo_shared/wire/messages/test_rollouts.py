from typing import Any

import msgpack
import numpy as np
import pytest

from echo_shared.errors import CodecError
from echo_shared.wire.codec import _plain, decode_from_hub, decode_from_node, encode
from echo_shared.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_FRAME_FROM_NODE_BYTES,
    MAX_GROUP_SIZE,
    MAX_PARTS_TOKENS,
    MAX_PREFIX_TOKENS,
    MAX_ROUTES_BYTES,
    MAX_VERSION_SPANS,
    Rollout,
    VersionSpan,
    rollout_id,
)
from echo_shared.wire.messages.fields import MAX_TOKENS
from tests.echo_shared.wire.messages.examples import CONTINUED, PARTS, ROLLOUT, array, changed, part


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
        {"routes": bytes(MAX_ROUTES_BYTES + 1)},
        {"routes": "ab"},
        {"routes": [1, 2]},
    ],
    ids=str,
)
def test_a_rollout_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CodecError):
        decode_from_node(changed(ROLLOUT, **fields))


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


def test_rollouts_are_named_by_lease_and_index() -> None:
    assert rollout_id(12, 3) == "12-3"


def test_the_largest_rollout_with_routes_fits_a_frame_from_a_node() -> None:
    largest = ROLLOUT.model_copy(
        update={
            "completion_ids": np.zeros(MAX_TOKENS, np.int32),
            "behavior_logprobs": np.zeros(MAX_TOKENS, np.float32),
            "routes": bytes(MAX_ROUTES_BYTES),
            "versions": (VersionSpan(policy_version=2**31 - 1, num_tokens=MAX_TOKENS),) * MAX_VERSION_SPANS,
        }
    )
    frame = encode(largest)
    assert len(frame) <= MAX_FRAME_FROM_NODE_BYTES
    assert decode_from_node(frame).routes == largest.routes  # type: ignore[union-attr]


def test_an_older_node_sends_no_routes() -> None:
    fields = {name: value for name, value in ROLLOUT.__dict__.items() if name != "routes"}
    decoded = decode_from_node(msgpack.packb(fields, default=_plain))
    assert isinstance(decoded, Rollout) and decoded.routes == b""
