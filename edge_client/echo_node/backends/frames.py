"""Convert groups, partial and finished rollouts, and errors to frames between `process.EngineChild` and its
`worker`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any, Final

import numpy as np

from echo_shared.errors import BackendError, EchoError
from echo_shared.messages import FinishReason
from echo_shared.sampling import DrawnPart, FinishedRollout, GroupRequest, Prefix
from echo_shared.scoring import ScoreRequest

_SCALARS: Final = ("lease_id", "group_id", "index", "policy_version", "sampling_s", "num_given")
_PART_SCALARS: Final = ("lease_id", "index", "policy_version", "start", "sampling_s")


def group_to_frame(request: GroupRequest) -> dict[str, Any]:
    frame = {field.name: getattr(request, field.name) for field in fields(GroupRequest)}
    return {**frame, "prefixes": [asdict(prefix) for prefix in request.prefixes]}


def group_from_frame(frame: dict[str, Any]) -> GroupRequest:
    tuples = {name: tuple(frame[name]) for name in ("indices", "stop_ids")}
    return GroupRequest(**{**frame, **tuples, "prefixes": tuple(Prefix(**prefix) for prefix in frame["prefixes"])})


def parts_to_frame(parts: Sequence[DrawnPart]) -> dict[str, Any]:
    """Pack parts column by column, like `rollouts_to_frame`. `parts` is not empty."""
    return {
        **{name: [getattr(part, name) for part in parts] for name in _PART_SCALARS},
        "lengths": [len(part.ids) for part in parts],
        "ids": np.concatenate([part.ids for part in parts]),
        "logprobs": np.concatenate([part.logprobs for part in parts]),
    }


def parts_from_frame(frame: dict[str, Any]) -> Iterator[DrawnPart]:
    begin = 0
    for row, length in enumerate(frame["lengths"]):
        here = slice(begin, begin + length)
        begin += length
        scalars = {name: frame[name][row] for name in _PART_SCALARS}
        yield DrawnPart(**scalars, ids=frame["ids"][here], logprobs=frame["logprobs"][here])


def rollouts_to_frame(rollouts: list[FinishedRollout]) -> dict[str, Any]:
    """Pack rollouts column by column, arrays concatenated: many rollouts cost little more than one."""
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


def score_to_frame(request: ScoreRequest) -> dict[str, Any]:
    return {**asdict(request), "versions": [list(span) for span in request.versions]}


def score_from_frame(frame: dict[str, Any]) -> ScoreRequest:
    return ScoreRequest(**{**frame, "versions": tuple((version, count) for version, count in frame["versions"])})


def error_to_frame(error: EchoError) -> dict[str, Any]:
    """Build the worker's last frame."""
    return {"type": "ended", "code": error.code, "what": error.what, "got": error.got, "do": error.do}


def error_from_frame(frame: dict[str, Any]) -> BackendError:
    return BackendError(frame["what"], got=frame["got"], do=frame["do"], code=frame["code"])
