"""Groups, rollouts and errors as frames between `process.EngineChild` and its `worker`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Final

import numpy as np

from echo_shared.errors import BackendError, EchoError
from echo_shared.messages import FinishReason
from echo_shared.sampling import FinishedRollout, GroupRequest

_SCALARS: Final = ("lease_id", "group_id", "index", "policy_version", "sampling_s")


def group_to_frame(request: GroupRequest) -> dict[str, Any]:
    return {field.name: getattr(request, field.name) for field in fields(GroupRequest)}


def group_from_frame(frame: dict[str, Any]) -> GroupRequest:
    return GroupRequest(**{**frame, "indices": tuple(frame["indices"]), "stop_ids": tuple(frame["stop_ids"])})


def rollouts_to_frame(rollouts: list[FinishedRollout]) -> dict[str, Any]:
    """Column by column, the arrays laid end to end: many rollouts cost little more than one."""
    return {
        **{name: [getattr(rollout, name) for rollout in rollouts] for name in _SCALARS},
        "finish_reason": [rollout.finish_reason.value for rollout in rollouts],
        "lengths": [len(rollout.completion_ids) for rollout in rollouts],
        "completion_ids": np.concatenate([rollout.completion_ids for rollout in rollouts]),
        "behavior_logprobs": np.concatenate([rollout.behavior_logprobs for rollout in rollouts]),
    }


def rollouts_from_frame(frame: dict[str, Any]) -> Iterator[FinishedRollout]:
    begin = 0
    for row, length in enumerate(frame["lengths"]):
        here = slice(begin, begin + length)
        begin += length
        yield FinishedRollout(
            **{name: frame[name][row] for name in _SCALARS},
            finish_reason=FinishReason(frame["finish_reason"][row]),
            completion_ids=frame["completion_ids"][here],
            behavior_logprobs=frame["behavior_logprobs"][here],
        )


def error_to_frame(error: EchoError) -> dict[str, Any]:
    """The worker's last frame."""
    return {"type": "ended", "code": error.code, "what": error.what, "got": error.got, "do": error.do}


def error_from_frame(frame: dict[str, Any]) -> BackendError:
    return BackendError(frame["what"], got=frame["got"], do=frame["do"], code=frame["code"])
