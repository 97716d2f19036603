"""mlx-lm as a sampling engine: Metal on Apple silicon, the CPU elsewhere. Base models must be safetensors.

Every step feeds one token of each unfinished rollout. Between two steps, the prompts of new groups are prefilled in one
batch, each once, and their rollouts start in free rows; a group may have more rollouts than the engine has rows. A
rollout that continues a prefix reuses the computed prompt and adds the prefix. numpy draws the tokens, because
Apple's GPUs have no float64. MLX manages its own threads and ignores `EngineSettings.threads`.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import psutil
from numpy.typing import NDArray

from echo_node.backends.base import (
    OUT_OF_MEMORY,
    EngineEvent,
    EngineSettings,
    GroupFailed,
    check_ids,
    check_request,
)
from echo_node.backends.draw_rows import draw_rows
from echo_node.backends.mlx_model import MlxModel, MlxPolicy, Prompt, round_up
from echo_node.backends.scoring import intervals, joined
from echo_shared.errors import POLICY_UNUSABLE, BackendError
from echo_shared.sampling.interface import DrawnPart, FinishedRollout, GroupRequest, Prefix
from echo_shared.sampling.prefix_cache import KeptKeys, PrefixCache
from echo_shared.sampling.rollout_table import ActiveRollout, RolloutTable
from echo_shared.sampling.scoring import Intervals

DEFAULT_WIDTH: Final = 64
MlxPrefixCache = PrefixCache[Prompt]


@dataclass(slots=True, eq=False)
class _Group:
    request: GroupRequest
    pending: deque[int]
    """Indices of rollouts that wait for a row."""
    started_at: float = 0.0
    prompt: Prompt | None = None
    """The computed prompt, kept until the group's last rollout has started."""

    @property
    def length(self) -> int:
        """Maximum tokens that a rollout of the group feeds to the model. A completion's last token is never fed."""
        return len(self.request.prompt_ids) + self.request.max_tokens - 1


class MlxEngine:
    """An engine that samples with MLX. `base.Engine` describes its methods."""

    scores = True
    converted: Path | None = None

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        self._model = MlxModel()
        with _mlx_errors():
            self._model.open(base_dir, device=settings.device, precision=settings.precision)
        self.precision = self._model.precision
        self._width = settings.width or DEFAULT_WIDTH
        self._row_bytes = settings.kv_cache_bytes or psutil.virtual_memory().total // 4
        """Maximum bytes of keys, values and states of all rows."""
        self._new_prefixes(settings.kept_keys_share)
        self._reserved = (0, 0)
        """Size for which the model has reserved memory: (rows, tokens per row)."""
        return self._width

    def _new_prefixes(self, share: float) -> None:
        token_bytes = self._model.kv_bytes_per_token
        most = int(share * self._row_bytes) // token_bytes if self._model.cuts else 0
        self._prefixes, self._token_bytes = MlxPrefixCache(most, cuts=True), token_bytes

    @property
    def kept(self) -> KeptKeys:
        return self._prefixes.kept(self._token_bytes)

    def forget(self, version: int | None = None) -> None:
        self._prefixes.forget(version)

    def prepare(self, adapter_dir: Path) -> MlxPolicy:
        return self._model.read_policy(adapter_dir)

    def set_policy(self, policy: MlxPolicy | None) -> None:
        with _mlx_errors():
            self._model.set_policy(policy)

    def close(self) -> None:
        self._model, self._prefixes = MlxModel(), MlxPrefixCache(0)

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        self._table = RolloutTable()
        """Unfinished rollouts: row n of the table is the rollout in row n of the model's batch. Empty rows between them
        exist only while finished rollouts are removed.
        """
        self._waiting: _Group | None = None
        """Group whose remaining rollouts wait for a row. At most one group waits."""
        while True:
            events: list[EngineEvent] = []
            with _mlx_errors():
                self._admit(groups, events)
                if len(self._table):
                    self._step(events)
            if not events and not len(self._table):
                return
            yield events

    def cancel(self, lease_id: int) -> None:
        if self._waiting is not None and self._waiting.request.lease_id == lease_id:
            self._waiting = None
        self._table.drop(self._table.rows_of(lease_id))
        with _mlx_errors():
            self._close_gaps()

    def news(self) -> list[DrawnPart]:
        return self._table.news()

    def score(self, ids: NDArray[np.int32], first: int, temperature: float) -> Intervals:
        model = self._model
        check_ids(ids, vocab_size=model.vocab_size, max_positions=model.max_positions)
        with _mlx_errors():
            return joined(
                [intervals(logits, tokens, temperature) for logits, tokens in model.logits_before(ids, first)]
            )

    def _admit(self, groups: Iterator[GroupRequest], events: list[EngineEvent]) -> None:
        """Start rollouts while they fit: those of the waiting group first, then those of new groups."""
        running, now = len(self._table), time.perf_counter()
        starting: list[tuple[_Group, list[int]]] = []
        while len(self._table) < self._width and (group := self._waiting or self._next_group(groups, events)):
            first = len(self._table)
            if group.prompt is None:
                group.started_at = now
            while group.pending and self._fits(group.length):
                self._table.start((len(self._table),), group.request, (group.pending.popleft(),), group.started_at)
            if first < len(self._table):
                starting.append((group, list(range(first, len(self._table)))))
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
        """Return True if one more row of `length` tokens fits. A single row is always tried; if memory is short, the
        device reports it.
        """
        rows = len(self._table) + 1
        return rows <= self._width and (rows == 1 or rows <= self._max_rows(max(length, self._longest)))

    @property
    def _longest(self) -> int:
        return self._table.longest() - 1  # Subtract a completion's last token: the engine never feeds it to the model.

    def _max_rows(self, length: int) -> int:
        return min(self._width, max(1, self._row_bytes // self._model.bytes_per_row(round_up(length))))

    def _make_room(self, running: int) -> None:
        length = self._longest
        wanted = self._max_rows(length), round_up(length)
        if wanted != self._reserved:
            self._model.reserve(*wanted, kept_rows=running)
            self._reserved = wanted

    def _load_prompts(self, starting: list[tuple[_Group, list[int]]]) -> None:
        fresh = [group for group, _ in starting if group.prompt is None and not self._resume(group)]
        for group, prompt in zip(
            fresh, self._model.prefill([group.request.prompt_ids for group in fresh]), strict=True
        ):
            group.prompt = prompt
        for group, rows in starting:
            assert group.prompt is not None
            alike = [row for row in rows if self._prefix_of(row) is None]
            if alike:
                self._model.put(group.prompt, alike)
            for row in rows:
                if (prefix := self._prefix_of(row)) is not None:
                    ids = np.concatenate([group.request.prompt_ids, prefix.ids])
                    self._model.put(self._model.extend(group.prompt, ids), [row])
            if not group.pending:
                group.prompt = None

    def _resume(self, group: _Group) -> bool:
        """Compute the group's prompt, starting from the kept keys of a finished sequence with the same beginning.
        Return False if no such sequence is kept.
        """
        request = group.request
        count, kept = self._prefixes.take(request.prompt_ids, version=request.policy_version)
        if kept is None:
            return False
        group.prompt = self._model.extend(self._model.cut(kept, count), request.prompt_ids)
        self._prefixes.reused(count)
        return True

    def _prefix_of(self, row: int) -> Prefix | None:
        rollout = self._table.rollouts[row]
        assert rollout is not None
        return next((one for one in rollout.group.prefixes if one.index == rollout.index), None)

    def _step(self, events: list[EngineEvent]) -> None:
        """Draw one token for every row, and free the rows of finished rollouts."""
        rows = np.arange(len(self._table))
        logits = self._model.step(*self._table.next_inputs(rows))
        tokens, logprobs = draw_rows(logits, rows, *self._table.next_draws(rows))
        if not np.isfinite(logprobs).all():
            raise BackendError(
                "The model computed values that are not numbers (NaN or infinite).",
                got=f"{len(rows)} rollouts in progress",
                code=POLICY_UNUSABLE,
            )
        running = list(self._table.rollouts)
        finished = self._table.record(rows, tokens, logprobs, time.perf_counter())
        if finished and self._prefixes.max_tokens:
            self._keep(running, finished)
        if finished:
            events.extend(finished.values())
            self._close_gaps()

    def _keep(self, running: Sequence[ActiveRollout | None], finished: Mapping[int, FinishedRollout]) -> None:
        """Keep the keys and values of finished rollouts. `running`: the rollouts by row, before the last draw."""
        for row, rollout in finished.items():
            begun = running[row]
            assert begun is not None
            if begun.group.keep_keys:
                # The last token was drawn but not fed to the model.
                fed = np.concatenate([begun.group.prompt_ids, rollout.completion_ids[:-1]])
                self._prefixes.keep(fed, self._model.take(row, len(fed)), version=rollout.policy_version)

    def _close_gaps(self) -> None:
        sources, targets = self._table.close_gaps()
        if sources:
            self._model.move(sources, targets)


@contextmanager
def _mlx_errors() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or re.search("memory|alloc", str(error), re.IGNORECASE):
            raise BackendError(
                "The device has too little memory.", got=str(error), do="Lower the node's width.", code=OUT_OF_MEMORY
            ) from error
        raise BackendError("MLX failed.", got=str(error)) from error
