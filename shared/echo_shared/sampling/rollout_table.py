"""Rollouts of a batched engine in host memory: arrays with one row per rollout, so that no step loops over tokens.

An engine starts rollouts in rows (`start`). In each step it feeds every row's last token (`next_inputs`), draws with
every row's next uniform (`next_draws`) and stores the drawn tokens (`record`), which frees the rows of finished
rollouts. `news` returns each drawn token once, while its rollout is unfinished. A free row takes another rollout, or
one of the last rows (`close_gaps`); the engine must then move its own data of that row, such as keys and values.

Dimensions: W rows of the table, R rows of a call, T tokens, S stop tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo_shared.sampling import draws
from echo_shared.sampling.interface import DrawnPart, FinishedRollout, GroupRequest
from echo_shared.wire.messages import MAX_ROUTES_BYTES, NO_ROUTE, FinishReason


@dataclass(frozen=True, slots=True)
class ActiveRollout:
    """One unfinished rollout. `started` and the `now` of `record` must come from the same clock."""

    group: GroupRequest
    index: int
    started: float
    num_given: int = 0
    """Number of first tokens that came from the request's prefix."""
    routes: bytearray = field(default_factory=bytearray)
    """Routes (experts chosen for each token) of the tokens computed so far; empty if no routes are recorded."""
    num_unrouted: int = 0
    """Number of first tokens of the sequence whose routes are not in `routes`."""

    @classmethod
    def behind(cls, group: GroupRequest, index: int, started: float, num_given: int, routes: bytes) -> ActiveRollout:
        """Return a rollout that continues after its prefix. `routes`: the routes of the prefix's tokens, or empty."""
        return cls(group, index, started, num_given, bytearray(routes), 0 if routes else num_given)

    def finished(self, ids_T: NDArray[np.int32], logprobs_T: NDArray[np.float32], now: float) -> FinishedRollout:
        """Return the completion from its token ids [T] and log-probabilities [T] in nats."""
        stopped = int(ids_T[-1]) in self.group.stop_ids
        return FinishedRollout(
            lease_id=self.group.lease_id,
            group_id=self.group.group_id,
            index=self.index,
            policy_version=self.group.policy_version,
            completion_ids=ids_T,
            behavior_logprobs=logprobs_T,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            sampling_s=now - self.started,
            num_given=self.num_given,
            routes=self._routes(len(ids_T)),
        )

    def _routes(self, num_tokens: int) -> bytes:
        """Return the routes of all tokens, NO_ROUTE for the last one, which the model never reads; b"" without routes
        or if they would be too large.
        """
        count = num_tokens - self.num_unrouted - 1
        if not self.routes or len(self.routes) // count * num_tokens > MAX_ROUTES_BYTES:
            return b""
        nothing = bytes([NO_ROUTE]) * (len(self.routes) // count)
        return nothing * self.num_unrouted + bytes(self.routes) + nothing


class RolloutTable:
    """Rollouts by row, with their tokens so far. The table grows on demand."""

    def __init__(self) -> None:
        self.rollouts: list[ActiveRollout | None] = []
        """Rollout of each row; None: the row is free."""
        self._tokens_W, self._positions_W = (np.zeros(0, dtype=np.int32) for _ in range(2))
        self._drawn_W, self._told_W, self._limit_W, self._end_W = (np.zeros(0, dtype=np.int64) for _ in range(4))
        self._temperature_W = np.zeros(0)
        self._u_WT = np.zeros((0, 0))
        self._ids_WT = np.zeros((0, 0), dtype=np.int32)
        self._logprobs_WT = np.zeros((0, 0), dtype=np.float32)
        self._stops_WS = np.zeros((0, 0), dtype=np.int64)
        self._now = 0.0

    def __len__(self) -> int:
        """Return the number of rows, including free ones."""
        return len(self.rollouts)

    def free(self) -> list[int]:
        return [row for row, rollout in enumerate(self.rollouts) if rollout is None]

    def longest(self) -> int:
        """Return the largest possible length of a rollout in tokens, including its prompt; 0 if the table is empty."""
        used = [row for row, rollout in enumerate(self.rollouts) if rollout is not None]
        return int(self._end_W[used].max(initial=0))

    def start(
        self, rows: Sequence[int], group: GroupRequest, indices: Sequence[int], started: float, routes: bytes = b""
    ) -> None:
        """Start one rollout of `group` per index, in `rows`, which must be free or directly follow the last row.

        The first token to feed is the last token of the prompt, or of the rollout's prefix. `routes`: routes of the
        prefix's tokens, if there is a single prefix.
        """
        rows = list(rows)  # numpy would take a tuple as one index per dimension.
        self._make_room(max(rows) + 1, group.max_tokens, len(group.stop_ids))
        self.rollouts += [None] * (max(rows) + 1 - len(self.rollouts))
        for row, index in zip(rows, indices, strict=True):
            self.rollouts[row] = ActiveRollout(group, index, started)
        self._tokens_W[rows] = group.prompt_ids[-1]
        self._positions_W[rows] = len(group.prompt_ids) - 1
        self._drawn_W[rows] = self._told_W[rows] = 0
        self._limit_W[rows] = group.max_tokens
        self._end_W[rows] = len(group.prompt_ids) + group.max_tokens
        self._temperature_W[rows] = group.temperature
        self._stops_WS[rows] = -1
        self._stops_WS[rows, : len(group.stop_ids)] = group.stop_ids
        self._u_WT[rows, : group.max_tokens] = draws.group_uniforms(group.seed, indices, group.max_tokens)
        if group.prefixes:
            self._give_prefixes(dict(zip(indices, rows, strict=True)), group, started, routes)

    def _give_prefixes(self, rows: Mapping[int, int], group: GroupRequest, started: float, routes: bytes) -> None:
        """Move rollouts with a prefix to the prefix's end; `rows` maps index to row."""
        for prefix in group.prefixes:
            row, count = rows.get(prefix.index), len(prefix.ids)
            if row is not None:
                self.rollouts[row] = ActiveRollout.behind(group, prefix.index, started, count, routes)
                self._ids_WT[row, :count], self._logprobs_WT[row, :count] = prefix.ids, prefix.logprobs
                self._tokens_W[row] = prefix.ids[-1]
                self._positions_W[row] += count
                self._drawn_W[row] = self._told_W[row] = count

    def news(self) -> list[DrawnPart]:
        """Return the tokens of unfinished rollouts drawn since the last call, without prefixes."""
        parts = []
        for row in np.flatnonzero(self._drawn_W[: len(self)] > self._told_W[: len(self)]).tolist():
            rollout, new = self.rollouts[row], slice(self._told_W[row], self._drawn_W[row])
            if rollout is not None:
                ids_T, logprobs_T = self._ids_WT[row, new].copy(), self._logprobs_WT[row, new].copy()
                parts.append(
                    DrawnPart(
                        lease_id=rollout.group.lease_id,
                        index=rollout.index,
                        policy_version=rollout.group.policy_version,
                        start=int(self._told_W[row]),
                        ids=ids_T,
                        logprobs=logprobs_T,
                        sampling_s=self._now - rollout.started,
                    )
                )
        self._told_W[:] = self._drawn_W
        return parts

    def next_inputs(self, rows_R: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return each row's last token [R], to be fed next, and its position [R]."""
        return self._tokens_W[rows_R], self._positions_W[rows_R]

    def next_draws(self, rows_R: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the uniform in [0, 1) for each row's next draw [R], and its temperature [R]."""
        return self._u_WT[rows_R, self._drawn_W[rows_R]], self._temperature_W[rows_R]

    @property
    def returns_routes(self) -> bool:
        """True if the routes (experts chosen for each token) of at least one rollout must be recorded."""
        return any(rollout is not None and rollout.group.returns_routes for rollout in self.rollouts)

    def record(
        self,
        rows_R: NDArray[np.int64],
        tokens_R: NDArray[np.int64],
        logprobs_R: NDArray[np.float64],
        now: float,
        routes_RB: NDArray[np.uint8] | None = None,
    ) -> dict[int, FinishedRollout]:
        """Store one drawn token per row [R], with log-probabilities [R] in nats. `routes_RB`: for a mixture of experts,
        the ids of the experts that the layers chose for the token before the drawn one, B bytes each.

        Return the finished rollouts by row, in the order of `rows_R`; their rows become free.
        """
        self._now = now
        if routes_RB is not None:
            for row, route_B in zip(rows_R.tolist(), routes_RB, strict=True):
                begun = self.rollouts[row]
                if begun is not None and begun.group.returns_routes:
                    begun.routes.extend(route_B.tobytes())
        drawn_R = self._drawn_W[rows_R]
        self._ids_WT[rows_R, drawn_R] = tokens_R
        self._logprobs_WT[rows_R, drawn_R] = logprobs_R
        self._tokens_W[rows_R] = tokens_R
        self._positions_W[rows_R] += 1
        drawn_R += 1
        self._drawn_W[rows_R] = drawn_R
        ends_R = (tokens_R[:, None] == self._stops_WS[rows_R]).any(axis=1) | (drawn_R == self._limit_W[rows_R])
        finished = {}
        for row in rows_R[ends_R].tolist():
            rollout, count = self.rollouts[row], self._drawn_W[row]
            assert rollout is not None
            ids_T, logprobs_T = self._ids_WT[row, :count].copy(), self._logprobs_WT[row, :count].copy()
            finished[row] = rollout.finished(ids_T, logprobs_T, now)
            self.rollouts[row] = None
        return finished

    def rows_of(self, lease_id: int, index: int | None = None) -> list[int]:
        """Return the rows of a lease's rollouts; with `index`, return only that rollout's row."""
        return [
            row
            for row, rollout in enumerate(self.rollouts)
            if rollout is not None and rollout.group.lease_id == lease_id and index in (None, rollout.index)
        ]

    def drop(self, rows: Sequence[int]) -> None:
        """Free these rows; their unfinished rollouts are lost."""
        for row in rows:
            self.rollouts[row] = None

    def close_gaps(self) -> tuple[list[int], list[int]]:
        """Move the last rows into free ones and shorten the table. Returns (source rows, target rows) of the moves."""
        used = [row for row, rollout in enumerate(self.rollouts) if rollout is not None]
        targets = [row for row in self.free() if row < len(used)]
        sources = used[len(used) - len(targets) :]
        if targets:
            for array in self._arrays():
                array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self.rollouts[target] = self.rollouts[source]
        del self.rollouts[len(used) :]
        return sources, targets

    def _arrays(self) -> Sequence[NDArray[Any]]:
        return (*self._by_row(), self._stops_WS, self._u_WT, self._ids_WT, self._logprobs_WT)

    def _by_row(self) -> Sequence[NDArray[Any]]:
        counts = (self._drawn_W, self._told_W, self._limit_W, self._end_W)
        return (self._tokens_W, self._positions_W, *counts, self._temperature_W)

    def _make_room(self, rows: int, tokens: int, stops: int) -> None:
        have_rows, have_tokens = self._ids_WT.shape
        have_stops = self._stops_WS.shape[1]
        if rows <= have_rows and tokens <= have_tokens and stops <= have_stops:
            return
        rows = have_rows if rows <= have_rows else max(rows, 2 * have_rows)
        tokens, stops = max(tokens, have_tokens), max(stops, have_stops, 1)
        (
            self._tokens_W,
            self._positions_W,
            self._drawn_W,
            self._told_W,
            self._limit_W,
            self._end_W,
            self._temperature_W,
        ) = (_enlarged(array, (rows,)) for array in self._by_row())
        self._u_WT, self._ids_WT, self._logprobs_WT = (
            _enlarged(array, (rows, tokens)) for array in (self._u_WT, self._ids_WT, self._logprobs_WT)
        )
        self._stops_WS = _enlarged(self._stops_WS, (rows, stops), fill=-1)


def _enlarged(array: NDArray[Any], shape: tuple[int, ...], fill: int = 0) -> NDArray[Any]:
    larger = np.full(shape, fill, dtype=array.dtype)
    larger[tuple(slice(size) for size in array.shape)] = array
    return larger
