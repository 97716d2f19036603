"""The frames between hub and learner process, and the encoding of batches and rollouts in them. Loads no torch.

The hub sends a request {call, command, ...}; `call` is its number. The learner answers with any number of {call, kind:
"item", ...}, then with one {call, kind: "result", policy_version, ...} or {call, kind: "error", code, what, got, do}.
The only item of "train" says that the step is computed. The result of a "train" may come after answers to later
requests, but always before the result of the next "train".

{call: 0, kind: "disk", full} says that the learner waits for disk space; `full` is the disk's message. An empty `full`
means that the learner writes again.

"begin" starts a step like "train", on groups that "hold" sent before and that "begin" lists. The learner writes the
step's results only after "confirm". Between "begin" and "confirm", only "hold" may be sent. "hold" and "confirm" have
no answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from echo_hub.learner.settings import StepTold, TrainingGroup, TrainingRollout
from echo_shared.errors import ConfigError, EchoError, LearnerError, StorageError
from echo_shared.process.child import Frame
from echo_shared.records.rollout import pack_payload, unpack_payload
from echo_shared.sampling.interface import FinishedRollout, GroupRequest, Prefix
from echo_shared.wire.messages import FinishReason

_ERRORS: dict[str, type[EchoError]] = {cls.default_code: cls for cls in (ConfigError, LearnerError, StorageError)}


def pack_groups(groups: Sequence[TrainingGroup]) -> list[Frame]:
    return [pack_group(group) for group in groups]


def pack_group(group: TrainingGroup) -> Frame:
    return {"prompt_ids": group.prompt_ids, "rollouts": [pack_payload(rollout) for rollout in group.rollouts]}


def unpack_groups(frames: Sequence[Frame]) -> list[TrainingGroup]:
    return [
        TrainingGroup(
            prompt_ids=frame["prompt_ids"],
            rollouts=tuple(unpack_payload(TrainingRollout, rollout) for rollout in frame["rollouts"]),
        )
        for frame in frames
    ]


def pack_request(request: GroupRequest) -> Frame:
    return {**_fields(request), "prefixes": [_fields(prefix) for prefix in request.prefixes]}


def unpack_request(frame: Frame) -> GroupRequest:
    tuples = {name: tuple(frame[name]) for name in ("indices", "stop_ids")}
    return GroupRequest(**{**frame, **tuples, "prefixes": tuple(Prefix(**prefix) for prefix in frame["prefixes"])})


def pack_rollout(rollout: FinishedRollout) -> Frame:
    return _fields(rollout)


def unpack_rollout(frame: Frame) -> FinishedRollout:
    return FinishedRollout(**{**frame, "finish_reason": FinishReason(frame["finish_reason"])})


def pack_told(told: Mapping[int, StepTold]) -> list[Frame]:
    return [{"step": step, **_fields(of_step)} for step, of_step in told.items()]


def unpack_told(packed: Sequence[Frame]) -> dict[int, StepTold]:
    return {frame["step"]: StepTold(metrics=frame["metrics"], screen=frame["screen"]) for frame in packed}


def pack_error(error: EchoError) -> Frame:
    return {"code": error.code, "what": error.what, "got": error.got, "do": error.do}


def failure(error: Exception) -> Frame:
    """Return the answer to a command that failed, for any kind of error."""
    if not isinstance(error, EchoError):
        got = f"{type(error).__name__}: {error}"
        error = LearnerError("The learner failed.", got=got, do="See logs/learner.log.")
    return {"kind": "error", **pack_error(error)}


def unpack_error(frame: Frame) -> EchoError:
    cls = _ERRORS.get(frame["code"], LearnerError)
    return cls(frame["what"], got=frame["got"], do=frame["do"], code=frame["code"])


def _fields(value: Any) -> Frame:
    return {name: getattr(value, name) for name in _names(value.__class__)}


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple([field.name for field in fields(kind)])
