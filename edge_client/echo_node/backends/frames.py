"""Converts groups, rollouts and errors to frames between `process.EngineChild` and its `worker`, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any, Final

import numpy as np

from echo_shared.errors import BackendError, EchoError
from echo_shared.sampling.interface import DrawnPart, FinishedRollout, GroupRequest, Prefix
from echo_shared.sampling.scoring import ScoreRequest
from echo_shared.wire.messages import FinishReason

_ARRAYS: Final = frozenset({"completion_ids", "behavior_logprobs"})
_PART_ARRAYS: Final = frozenset({"ids", "logprobs"})


def group_to_frame(request: GroupRequest) -> dict[str, Any]:
    frame = {field.name: getattr(request, field.name) for field in fields(GroupRequest)}
    return {**frame, "prefixes": [asdict(prefix) for prefix in request.prefixes]}


def group_from_frame(frame: dict[str, Any]) -> GroupRequest:
    tuples = {name: tuple(frame[name]) for name in ("indices", "stop_ids")}
    return GroupRequest(**{**frame, **tuples, "prefixes": tuple(Prefix(**prefix) for prefix in frame["prefixes"])})


def parts_to_frame(parts: Sequence[DrawnPart]) -> dict[str, Any]:
    """Pack tokens of unfinished rollouts into a frame, as `rollouts_to_frame` packs rollouts. `parts` must not be
    empty.
    """
    return {**_columns(parts, _PART_ARRAYS), "lengths": [len(part.ids) for part in parts]}


def parts_from_frame(frame: dict[str, Any]) -> Iterator[DrawnPart]:
    return (DrawnPart(**row) for row in _rows(frame, DrawnPart, _PART_ARRAYS))


def rollouts_to_frame(rollouts: list[FinishedRollout]) -> dict[str, Any]:
    """Pack rollouts by field, as one list or one concatenated array, so that many rollouts cost little more
    than one.
    """
    return {**_columns(rollouts, _ARRAYS), "lengths": [len(rollout.completion_ids) for rollout in rollouts]}


def rollouts_from_frame(frame: dict[str, Any]) -> Iterator[FinishedRollout]:
    for row in _rows(frame, FinishedRollout, _ARRAYS):
        yield FinishedRollout(**{**row, "finish_reason": FinishReason(row["finish_reason"])})


def _columns(values: Sequence[DrawnPart] | Sequence[FinishedRollout], arrays: frozenset[str]) -> dict[str, Any]:
    """Return the values of each field of all objects: fields in `arrays` as one concatenated array, other fields as a
    list.
    """
    columns = {field.name: [getattr(value, field.name) for value in values] for field in fields(values[0])}
    return {name: np.concatenate(column) if name in arrays else column for name, column in columns.items()}


def _rows(
    frame: dict[str, Any], kind: type[DrawnPart | FinishedRollout], arrays: frozenset[str]
) -> Iterator[dict[str, Any]]:
    """Yield the fields of each packed object of the type `kind`. The frame's `lengths` say where to cut the
    concatenated arrays; entries that are no field of this type are ignored.
    """
    scalars = [field.name for field in fields(kind) if field.name not in arrays]
    begin = 0
    for row, length in enumerate(frame["lengths"]):
        here = slice(begin, begin + length)
        begin += length
        yield {**{name: frame[name][row] for name in scalars}, **{name: frame[name][here] for name in arrays}}


def score_to_frame(request: ScoreRequest) -> dict[str, Any]:
    return {**asdict(request), "versions": [list(span) for span in request.versions]}


def score_from_frame(frame: dict[str, Any]) -> ScoreRequest:
    return ScoreRequest(**{**frame, "versions": tuple((version, count) for version, count in frame["versions"])})


def error_to_frame(error: EchoError) -> dict[str, Any]:
    """Return the last frame that a worker sends. It tells the node, the parent process, the error that ended the
    worker.
    """
    return {"type": "ended", "code": error.code, "what": error.what, "got": error.got, "do": error.do}


def error_from_frame(frame: dict[str, Any]) -> BackendError:
    return BackendError(frame["what"], got=frame["got"], do=frame["do"], code=frame["code"])
