"""mlx-lm as a sampling engine: Metal on Apple Silicon, the CPU elsewhere. Base models as safetensors only.

Every step feeds one token of each rollout in progress. New groups are prefilled together, once each, between two steps,
and start in the rows that have become free; a group may be wider than the engine. Tokens are drawn by numpy, since
Apple's GPUs have no float64. The engine's threads are MLX's own affair: `EngineSettings.threads` is not heeded.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from echo_node.backends.base import (
    OUT_OF_MEMORY,
    EngineEvent,
    EngineSettings,
    GroupFailed,
    check_request,
)
from echo_node.backends.draw_rows import draw_rows
from echo_node.backends.mlx_model import MlxModel, MlxPolicy, Prompt, round_up
from echo_node.backends.slots import SlotTable
from echo_shared.errors import BackendError
from echo_shared.sampling import FinishedRollout, GroupRequest

DEFAULT_WIDTH: Final = 64


@dataclass(slots=True, eq=False)
class _Group:
    request: GroupRequest
    pending: deque[int]
    """Indices that have no row yet."""
    started_at: float = 0.0
    prompt: Prompt | None = None
    """From the first row's start to the last one's."""

    @property
    def length(self) -> int:
        """Tokens fed at most: a completion's last one is not."""
        return len(self.request.prompt_ids) + self.request.max_tokens - 1


@dataclass(frozen=True, slots=True)
class _Row:
    group: _Group
    index: int
    slot: int


class MlxEngine:
    """See `base.Engine`."""

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        self._model = MlxModel()
        with _mlx_errors():
            self._model.open(base_dir, device=settings.device, precision=settings.precision)
        self._width = settings.width or DEFAULT_WIDTH
        budget = settings.kv_cache_bytes or psutil.virtual_memory().total // 4
        self._max_cells = budget // self._model.kv_bytes_per_token
        self._reserved = (0, 0)
        """Rows and tokens a row that the model has room for."""
        return self._width

    def prepare(self, adapter_dir: Path) -> MlxPolicy:
        return self._model.read_policy(adapter_dir)

    def set_policy(self, policy: MlxPolicy | None) -> None:
        with _mlx_errors():
            self._model.set_policy(policy)

    def close(self) -> None:
        self._model = MlxModel()

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        self._slots = SlotTable(self._width)
        self._free = list(range(self._width))
        self._rows: list[_Row] = []
        """Each at its number in the model."""
        self._waiting: _Group | None = None
        """The one group with indices pending."""
        while True:
            events: list[EngineEvent] = []
            with _mlx_errors():
                self._admit(groups, events)
                if self._rows:
                    self._step(events)
            if not events and not self._rows:
                return
            yield events

    def cancel(self, lease_id: int) -> None:
        if self._waiting is not None and self._waiting.request.lease_id == lease_id:
            self._waiting = None
        cancelled = [number for number, row in enumerate(self._rows) if row.group.request.lease_id == lease_id]
        for number in cancelled:
            self._slots.drop(self._rows[number].slot)
        with _mlx_errors():
            self._remove(cancelled)

    # Admission

    def _admit(self, groups: Iterator[GroupRequest], events: list[EngineEvent]) -> None:
        """Starts rows while they fit: of the waiting group, then of new ones."""
        running = len(self._rows)
        starting: list[tuple[_Group, list[int]]] = []
        while self._free and (group := self._waiting or self._next_group(groups, events)) is not None:
            first = len(self._rows)
            while group.pending and self._fits(group.length):
                self._start_row(group)
            if first < len(self._rows):
                starting.append((group, list(range(first, len(self._rows)))))
            self._waiting = group if group.pending else None
            if group.pending:
                break
        if starting:
            self._make_room(running)
            self._load_prompts(starting)

    def _next_group(self, groups: Iterator[GroupRequest], events: list[EngineEvent]) -> _Group | None:
        for request in groups:
            try:
                check_request(request, vocab_size=self._model.vocab_size, max_positions=self._model.max_positions)
            except BackendError as error:
                events.append(GroupFailed.of(request.lease_id, error))
            else:
                return _Group(request=request, pending=deque(request.indices))
        return None

    def _fits(self, length: int) -> bool:
        """Whether one more row of `length` fits. A row alone is always tried: the device then says whether it does."""
        rows = len(self._rows) + 1
        return bool(self._free) and (rows == 1 or rows <= self._max_rows(max(length, self._longest)))

    @property
    def _longest(self) -> int:
        return max((row.group.length for row in self._rows), default=0)

    def _max_rows(self, length: int) -> int:
        return min(self._width, max(1, self._max_cells // round_up(length)))

    def _start_row(self, group: _Group) -> None:
        slot, index = self._free.pop(), group.pending.popleft()
        self._slots.start(np.array([slot]), group.request, (index,))
        self._slots.token[slot] = group.request.prompt_ids[-1]
        self._rows.append(_Row(group, index, slot))

    def _make_room(self, running: int) -> None:
        length = self._longest
        wanted = self._max_rows(length), round_up(length)
        if wanted != self._reserved:
            self._model.reserve(*wanted, kept_rows=running)
            self._reserved = wanted

    def _load_prompts(self, starting: list[tuple[_Group, list[int]]]) -> None:
        fresh = [group for group, _ in starting if group.prompt is None]
        now = time.perf_counter()
        for group, prompt in zip(
            fresh, self._model.prefill([group.request.prompt_ids for group in fresh]), strict=True
        ):
            group.prompt = prompt
            group.started_at = now
        for group, rows in starting:
            assert group.prompt is not None
            self._model.put(group.prompt, rows)
            if not group.pending:
                group.prompt = None

    # Stepping

    def _step(self, events: list[EngineEvent]) -> None:
        """Draws one token for every row; those that are complete make room."""
        slots = np.array([row.slot for row in self._rows])
        logits = self._model.step(self._slots.token[slots], self._slots.position[slots])
        tokens, logprobs = draw_rows(
            logits, np.arange(len(slots)), self._slots.next_uniforms(slots), self._slots.temperature[slots]
        )
        if not np.isfinite(logprobs).all():
            raise BackendError(
                "The model computed values that are not numbers.", got=f"{len(slots)} rollouts in progress"
            )
        now = time.perf_counter()
        ended = np.flatnonzero(np.isin(slots, self._slots.record(slots, tokens, logprobs))).tolist()
        for number in ended:
            events.append(self._finished(self._rows[number], now))
        self._remove(ended)

    def _finished(self, row: _Row, now: float) -> FinishedRollout:
        completion_ids, behavior_logprobs, reason = self._slots.take(row.slot)
        request = row.group.request
        return FinishedRollout(
            lease_id=request.lease_id,
            group_id=request.group_id,
            index=row.index,
            policy_version=request.policy_version,
            completion_ids=completion_ids,
            behavior_logprobs=behavior_logprobs,
            finish_reason=reason,
            sampling_s=now - row.group.started_at,
        )

    def _remove(self, numbers: list[int]) -> None:
        """Ends these rows; the last ones that go on take their places."""
        if not numbers:
            return
        self._free += [self._rows[number].slot for number in numbers]
        left = len(self._rows) - len(numbers)
        gone = set(numbers)
        holes = [number for number in numbers if number < left]
        movers = [number for number in range(left, len(self._rows)) if number not in gone]
        if movers:
            self._model.move(movers, holes)
        for hole, mover in zip(holes, movers, strict=True):
            self._rows[hole] = self._rows[mover]
        del self._rows[left:]


@contextmanager
def _mlx_errors() -> Iterator[None]:
    """What MLX raises as BackendError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or re.search("memory|alloc", str(error), re.IGNORECASE):
            raise BackendError(
                "The device has too little memory.", got=str(error), do="Lower the node's width.", code=OUT_OF_MEMORY
            ) from error
        raise BackendError("MLX failed.", got=str(error)) from error
