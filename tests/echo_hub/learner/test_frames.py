from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from echo_hub.learner import frames
from echo_hub.learner.settings import TrainingGroup, TrainingRollout
from echo_shared.errors import ConfigError, EchoError, LearnerError, StorageError
from echo_shared.process.child import pack_frame, unpack_frame
from echo_shared.records.rollout import DrawnSpan
from echo_shared.sampling.interface import FinishedRollout, GroupRequest, Prefix
from echo_shared.wire.messages import FinishReason


def travelled(value: object) -> object:
    return unpack_frame(pack_frame({"value": value})[4:])["value"]


def assert_same(left: object, right: object) -> None:
    assert type(left) is type(right)
    for field in dataclasses.fields(left):  # type: ignore[arg-type]
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b and type(a) is type(b)


def test_a_request_and_a_rollout_arrive_unchanged() -> None:
    request = GroupRequest(
        lease_id=1,
        group_id=2,
        indices=(0, 5),
        prompt_ids=np.array([3, 4], dtype=np.int32),
        seed=2**64 - 1,
        policy_version=7,
        temperature=0.5,
        max_tokens=9,
        stop_ids=(1,),
    )
    assert_same(frames.unpack_request(travelled(frames.pack_request(request))), request)  # type: ignore[arg-type]
    prefix = Prefix(index=5, ids=np.array([8], np.int32), logprobs=np.array([-0.5], np.float32))
    begun = dataclasses.replace(request, prefixes=(prefix,))
    (arrived,) = frames.unpack_request(travelled(frames.pack_request(begun))).prefixes  # type: ignore[arg-type]
    assert_same(arrived, prefix)
    rollout = FinishedRollout(
        lease_id=1,
        group_id=2,
        index=5,
        policy_version=7,
        completion_ids=np.array([8], dtype=np.int32),
        behavior_logprobs=np.array([-0.25], dtype=np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.5,
    )
    assert_same(frames.unpack_rollout(travelled(frames.pack_rollout(rollout))), rollout)  # type: ignore[arg-type]


def test_groups_arrive_unchanged() -> None:
    rollout = TrainingRollout(
        completion_ids=np.array([8], dtype=np.int32),
        loss_mask=np.array([True]),
        behavior_logprobs=np.array([-0.25], dtype=np.float32),
        reward=0.5,
        finish_reason=FinishReason.LENGTH,
        sampling_s=0.25,
        spans=(DrawnSpan(node_id="a", policy_version=6, num_tokens=1),),
        draws=np.array([[2**64 - 1, 3, 1]], np.uint64),
    )
    group = TrainingGroup(prompt_ids=np.array([3, 4], dtype=np.int32), rollouts=(rollout, rollout))
    (back,) = frames.unpack_groups(travelled(frames.pack_groups([group])))  # type: ignore[arg-type]
    np.testing.assert_array_equal(back.prompt_ids, group.prompt_ids)
    for one in back.rollouts:
        assert_same(one, rollout)


@pytest.mark.parametrize("error", [LearnerError("a", got="b", do="c"), StorageError("a"), ConfigError("a", do="b")])
def test_an_error_arrives_with_its_type_and_text(error: EchoError) -> None:
    back = frames.unpack_error(travelled(frames.pack_error(error)))  # type: ignore[arg-type]
    assert type(back) is type(error)
    assert str(back) == str(error) and back.code == error.code
