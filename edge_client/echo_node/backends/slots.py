"""The rollouts in progress of a batched engine, as numpy columns: one row a slot, no Python loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from echo_shared import draws
from echo_shared.messages import FinishReason
from echo_shared.sampling import GroupRequest


class SlotTable:
    """`width` slots, each free or holding one rollout. Slots are given as arrays of slot numbers."""

    def __init__(self, width: int) -> None:
        self.active = np.zeros(width, np.bool_)
        self.token = np.zeros(width, np.int32)
        """The last token drawn, to be fed next ..."""
        self.position = np.zeros(width, np.int32)
        """... at this position."""
        self.temperature = np.ones(width, np.float64)
        self._drawn = np.zeros(width, np.int64)
        self._max_tokens = np.zeros(width, np.int64)
        self._stops = np.full((width, 1), -1, np.int64)
        self._u = np.zeros((width, 16), np.float64)
        self._ids = np.zeros((width, 16), np.int32)
        self._logprobs = np.zeros((width, 16), np.float32)

    def start(self, slots: NDArray[np.int64], request: GroupRequest, indices: Sequence[int]) -> None:
        """Puts rollouts of `request`, one an index, into as many free slots; they have drawn nothing yet."""
        self._make_room(request.max_tokens, len(request.stop_ids))
        self.active[slots] = True
        self.position[slots] = len(request.prompt_ids) - 1
        self.temperature[slots] = request.temperature
        self._drawn[slots] = 0
        self._max_tokens[slots] = request.max_tokens
        self._stops[slots] = -1
        self._stops[slots, : len(request.stop_ids)] = request.stop_ids
        self._u[slots, : request.max_tokens] = draws.group_uniforms(request.seed, indices, request.max_tokens)

    def _make_room(self, tokens: int, stops: int) -> None:
        missing = max(0, tokens - self._u.shape[1])
        if missing:
            self._u = np.pad(self._u, ((0, 0), (0, missing)))
            self._ids = np.pad(self._ids, ((0, 0), (0, missing)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, missing)))
        missing = max(0, stops - self._stops.shape[1])
        if missing:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=-1)

    def next_uniforms(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._u[slots, self._drawn[slots]]

    def record(
        self, slots: NDArray[np.int64], tokens: NDArray[np.int64], logprobs: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Notes one drawn token a slot; returns the slots whose rollout is now complete."""
        drawn = self._drawn[slots]
        self._ids[slots, drawn] = tokens
        self._logprobs[slots, drawn] = logprobs
        self.token[slots] = tokens
        self.position[slots] += 1
        self._drawn[slots] = drawn + 1
        complete = (drawn + 1 == self._max_tokens[slots]) | (self._stops[slots] == tokens[:, None]).any(axis=1)
        ended: NDArray[np.int64] = slots[complete]
        return ended

    def take(self, slot: int) -> tuple[NDArray[np.int32], NDArray[np.float32], FinishReason]:
        """Frees the slot of a complete rollout; returns its ids, log-probabilities and why it ended."""
        count = int(self._drawn[slot])
        stopped = count < self._max_tokens[slot] or self._ids[slot, count - 1] in self._stops[slot]
        self.active[slot] = False
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return self._ids[slot, :count].copy(), self._logprobs[slot, :count].copy(), reason

    def move(self, source: int, target: int) -> None:
        """Puts the rollout of slot `source` into the free slot `target`."""
        for column in (
            self.active,
            self.token,
            self.position,
            self.temperature,
            self._drawn,
            self._max_tokens,
            self._stops,
            self._u,
            self._ids,
            self._logprobs,
        ):
            column[target] = column[source]
        self.active[source] = False

    def drop(self, slot: int) -> None:
        """Frees the slot, whatever it holds."""
        self.active[slot] = False
