"""Groups, rollouts and errors survive the encoding for the pipe between node and engine unchanged."""

from __future__ import annotations

import dataclasses
from dataclasses import fields
from typing import Any

import numpy as np

from echo_node.backends.frames import (
    error_from_frame,
    error_to_frame,
    group_from_frame,
    group_to_frame,
    parts_from_frame,
    parts_to_frame,
    rollouts_from_frame,
    rollouts_to_frame,
)
from echo_shared.errors import CodecError
from echo_shared.process.child import pack_frame, unpack_frame
from echo_shared.sampling.interface import DrawnPart, FinishedRollout, GroupRequest, Prefix
from echo_shared.wire.messages import FinishReason


def through_the_pipe(frame: dict[str, Any]) -> dict[str, Any]:
    return unpack_frame(pack_frame(frame)[4:])


def assert_same(left: object, right: object) -> None:
    for field in fields(left):  # type: ignore[arg-type]
        a, b = getattr(left, field.name), getattr(right, field.name)
        assert type(a) is type(b)
        assert a.dtype == b.dtype and np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


def test_group() -> None:
    request = GroupRequest(
        lease_id=2**53,
        group_id=4,
        indices=(3, 1),
        prompt_ids=np.array([1, 2, 3], np.int32),
        seed=2**64 - 1,
        policy_version=2,
        temperature=0.25,
        max_tokens=7,
        stop_ids=(),
    )
    assert_same(group_from_frame(through_the_pipe(group_to_frame(request))), request)


def test_prefixes() -> None:
    prefixes = tuple(
        Prefix(index=index, ids=np.arange(index, dtype=np.int32), logprobs=np.zeros(index, np.float32))
        for index in (3, 1)
    )
    request = GroupRequest(
        lease_id=1,
        group_id=4,
        indices=(3, 1, 2),
        prompt_ids=np.array([1], np.int32),
        seed=2,
        policy_version=2,
        temperature=1.0,
        max_tokens=7,
        stop_ids=(1,),
        prefixes=prefixes,
    )
    arrived = group_from_frame(through_the_pipe(group_to_frame(request)))
    assert_same(dataclasses.replace(arrived, prefixes=()), dataclasses.replace(request, prefixes=()))
    for left, right in zip(arrived.prefixes, prefixes, strict=True):
        assert_same(left, right)


def test_parts() -> None:
    parts = [
        DrawnPart(
            lease_id=number,
            index=number + 1,
            policy_version=number + 7,
            start=10 * number,
            ids=np.arange(length, dtype=np.int32),
            logprobs=np.linspace(-1, 0, length, dtype=np.float32),
            sampling_s=number / 4,
        )
        for number, length in enumerate((2, 5, 1))
    ]
    arrived = list(parts_from_frame(through_the_pipe(parts_to_frame(parts))))
    assert len(arrived) == 3
    for left, right in zip(arrived, parts, strict=True):
        assert_same(left, right)


def test_error() -> None:
    error = CodecError("It is damaged.", got="bytes", do="Fetch it again.")
    arrived = error_from_frame(through_the_pipe(error_to_frame(error)))
    assert (str(arrived), arrived.code) == (str(error), "codec")


def test_rollouts() -> None:
    rollouts = [
        FinishedRollout(
            lease_id=number,
            group_id=number + 10,
            index=number % 2,
            policy_version=3,
            completion_ids=np.arange(length, dtype=np.int32),
            behavior_logprobs=np.linspace(-1, 0, length, dtype=np.float32),
            finish_reason=FinishReason.STOP if number else FinishReason.LENGTH,
            sampling_s=0.5,
            num_given=number,
            routes=bytes(range(3 * length * (number % 2))),
        )
        for number, length in enumerate((1, 4, 2))
    ]
    arrived = list(rollouts_from_frame(through_the_pipe(rollouts_to_frame(rollouts))))
    assert len(arrived) == 3
    for left, right in zip(arrived, rollouts, strict=True):
        assert_same(left, right)
