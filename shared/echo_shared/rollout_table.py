"""What a batch of rollouts in progress knows of each row on the host, as arrays, so that a step is a few array calls.

Rows are 0..n-1; a row whose rollout has ended is free, and stays in the batch until it is filled or moved over.

Dimensions: W rows, T tokens, S stop tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo_shared.messages import FinishReason
from echo_shared.sampling import FinishedRollout, GroupRequest


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout in progress; `started` by time.perf_counter."""

    group: GroupRequest
    index: int
    started: float

    def finished(self, ids_T: NDArray[np.int32], logprobs_T: NDArray[np.float32]) -> FinishedRollout:
        stopped = int(ids_T[-1]) in self.group.stop_ids
        return FinishedRollout(
            lease_id=self.group.lease_id,
            group_id=self.group.group_id,
            index=self.index,
            policy_version=self.group.policy_version,
            completion_ids=ids_T,
            behavior_logprobs=logprobs_T,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            sampling_s=time.perf_counter() - self.started,
        )


class RolloutTable:
    """Rollouts by row, with the tokens that they have so far."""

    def __init__(self) -> None:
        self.rollouts: list[Rollout | None] = []
        self.temperature_W = np.zeros(0)
        self._u_WT = np.zeros((0, 0))
        self._ids_WT = np.zeros((0, 0), dtype=np.int32)
        self._logprobs_WT = np.zeros((0, 0), dtype=np.float32)
        self._stops_WS = np.zeros((0, 0), dtype=np.int64)
        self._drawn_W, self._limit_W, self._prompt_W = (np.zeros(0, dtype=np.int64) for _ in range(3))

    def __len__(self) -> int:
        """Rows, free ones included."""
        return len(self.rollouts)

    def free(self) -> list[int]:
        return [row for row, rollout in enumerate(self.rollouts) if rollout is None]

    def longest(self) -> int:
        """Tokens that the longest rollout may come to, its prompt included."""
        rows = len(self)
        used = np.array([rollout is not None for rollout in self.rollouts], dtype=bool)
        return int(((self._prompt_W[:rows] + self._limit_W[:rows]) * used).max(initial=0))

    def put(self, row: int, rollout: Rollout, u_T: NDArray[np.float64], token: int, logprob: float) -> None:
        """Begins a rollout by its first token, in a free row or behind the last."""
        group = rollout.group
        if row == len(self):
            self.rollouts.append(rollout)
        else:
            self.rollouts[row] = rollout
        self._make_room(row + 1, group.max_tokens, len(group.stop_ids))
        self.temperature_W[row] = group.temperature
        self._u_WT[row, : len(u_T)] = u_T
        self._ids_WT[row, 0], self._logprobs_WT[row, 0] = token, logprob
        self._stops_WS[row] = -1
        self._stops_WS[row, : len(group.stop_ids)] = group.stop_ids
        self._drawn_W[row], self._limit_W[row], self._prompt_W[row] = 1, group.max_tokens, len(group.prompt_ids)

    def next_inputs(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """[2, W]: each row's last token and its position; [2, W]: the uniform for the next one and the temperature."""
        rows = np.arange(len(self))
        drawn = self._drawn_W[rows]
        inputs = np.stack([self._ids_WT[rows, drawn - 1].astype(np.int64), self._prompt_W[rows] + drawn - 1])
        return inputs, np.stack([self._u_WT[rows, drawn], self.temperature_W[rows]])

    def add(self, tokens_W: NDArray[np.int64], logprobs_W: NDArray[np.float64]) -> list[FinishedRollout]:
        """Appends a token to each row; the rows that this ends become free."""
        rows = np.arange(len(self))
        drawn = self._drawn_W[rows]
        self._ids_WT[rows, drawn] = tokens_W
        self._logprobs_WT[rows, drawn] = logprobs_W
        drawn += 1
        self._drawn_W[rows] = drawn
        ends = (tokens_W[:, None] == self._stops_WS[rows]).any(axis=1) | (drawn == self._limit_W[rows])
        finished = []
        for row in np.flatnonzero(ends).tolist():
            rollout = self.rollouts[row]
            assert rollout is not None
            count = drawn[row]
            finished.append(rollout.finished(self._ids_WT[row, :count].copy(), self._logprobs_WT[row, :count].copy()))
            self.rollouts[row] = None
        return finished

    def free_lease(self, lease_id: int) -> None:
        self.rollouts = [
            None if rollout is not None and rollout.group.lease_id == lease_id else rollout for rollout in self.rollouts
        ]

    def close_gaps(self) -> tuple[list[int], list[int]]:
        """Moves the last rows into the free ones; returns from where to where."""
        used = [row for row, rollout in enumerate(self.rollouts) if rollout is not None]
        targets = [row for row in self.free() if row < len(used)]
        sources = used[len(used) - len(targets) :]
        for array in self._arrays():
            array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self.rollouts[target] = self.rollouts[source]
        del self.rollouts[len(used) :]
        return sources, targets

    def _arrays(self) -> Sequence[NDArray[Any]]:
        return (
            self.temperature_W,
            self._u_WT,
            self._ids_WT,
            self._logprobs_WT,
            self._stops_WS,
            self._drawn_W,
            self._limit_W,
            self._prompt_W,
        )

    def _make_room(self, rows: int, tokens: int, stops: int) -> None:
        have_rows, have_tokens = self._ids_WT.shape
        have_stops = self._stops_WS.shape[1]
        if rows <= have_rows and tokens <= have_tokens and stops <= have_stops:
            return
        rows = have_rows if rows <= have_rows else max(rows, 2 * have_rows)
        tokens, stops = max(tokens, have_tokens), max(stops, have_stops, 1)
        self.temperature_W, self._drawn_W, self._limit_W, self._prompt_W = (
            _enlarged(array, (rows,)) for array in (self.temperature_W, self._drawn_W, self._limit_W, self._prompt_W)
        )
        self._u_WT, self._ids_WT, self._logprobs_WT = (
            _enlarged(array, (rows, tokens)) for array in (self._u_WT, self._ids_WT, self._logprobs_WT)
        )
        self._stops_WS = _enlarged(self._stops_WS, (rows, stops), fill=-1)


def _enlarged(array: NDArray[Any], shape: tuple[int, ...], fill: int = 0) -> NDArray[Any]:
    larger = np.full(shape, fill, dtype=array.dtype)
    larger[tuple(slice(size) for size in array.shape)] = array
    return larger
