"""llama.cpp as a sampling engine: continuous batching over one shared KV cache, a group's prompt decoded once.

Each step feeds one token of every rollout in progress together with pieces of new groups' prompts. A group's rollouts
start from its prompt's last logits, its keys and values shared by sequence copies; they start as slots become free, so
a group may be wider than the engine. At most one group at a time is partly started: its prompt waits in a sequence of
its own. Groups are admitted only with room for their longest completions, so the cache never overflows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import psutil
from numpy.typing import NDArray

from echo_node.backends.base import EngineEvent, EngineSettings, GroupFailed, check_request
from echo_node.backends.draw_rows import draw_rows
from echo_node.backends.gguf_convert import Precision, convert_model, read_shape, write_adapter
from echo_node.backends.llama_cpp_native import ContextSize, LlamaContext
from echo_node.backends.slots import SlotTable
from echo_node.host import hardware
from echo_shared.adapter import load_adapter
from echo_shared.errors import BackendError
from echo_shared.sampling import FinishedRollout, GroupRequest

DEFAULT_WIDTH: Final = 32
"""Wider batches spend more on attention over each other's cells than they gain in the matrix products."""
MAX_WIDTH: Final = 255
"""llama.cpp holds 256 sequences; one keeps the prompt of the partly started group."""

_PREFILL_TOKENS: Final = 192
"""Prompt tokens in one step at most, so that a long prompt does not hold up the others."""
_COMFORTABLE_CELLS: Final = 8_192
"""Every rollout attends over the cache of all of them: beyond this, more at once is slower. Long ones may use more."""
_MAX_CELLS: Final = 32_768
_CELL_STEP: Final = 256
_F32_MODEL_BYTES: Final = 256 * 2**20
"""A model that is smaller than this in float32 runs in float32, exactly."""


@dataclass(slots=True, eq=False)
class _Group:
    request: GroupRequest
    started_at: float
    pending: deque[int]
    """Indices that have no slot yet."""
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """(slot, index) that start as soon as the prompt is decoded."""
    running: int = 0
    prefilled: int = 0
    first_logits: NDArray[np.float32] | None = None
    """[1, vocabulary], after the whole prompt."""
    kept: bool = False
    """The prompt stands in the keeping sequence as well."""

    @property
    def row_cells(self) -> int:
        """A completion's last token is never fed."""
        return self.request.max_tokens - 1


class LlamaCppEngine:
    """See `base.Engine`."""

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        self._shape = read_shape(base_dir)
        self._derived_dir = derived_dir
        precision = _precision(base_dir, settings.precision)
        self._width = min(settings.width or DEFAULT_WIDTH, MAX_WIDTH)
        value_bytes = 4 if precision == "f32" else 2
        budget = settings.kv_cache_bytes or psutil.virtual_memory().total // 4
        affordable = budget // (self._shape.kv_values_per_token * value_bytes)
        cells = min(max(_COMFORTABLE_CELLS, min(self._shape.max_positions, _MAX_CELLS)), affordable)
        self._cells = max(_CELL_STEP, cells - cells % _CELL_STEP)
        self._batch_tokens = self._width + _PREFILL_TOKENS
        size = ContextSize(
            cells=self._cells,
            sequences=self._width + 1,
            batch_tokens=self._batch_tokens,
            threads=settings.threads or hardware.sensible_threads(),
            exact_kv=precision == "f32",
        )
        self._llama = LlamaContext()
        self._llama.open(convert_model(base_dir, derived_dir, precision), size, gpu=settings.device != "cpu")
        self._reset()
        return self._width

    def set_policy(self, version: int, adapter_dir: Path | None) -> None:
        if adapter_dir is None:
            self._llama.set_adapter(None)
            return
        path = self._derived_dir / f"adapter-{version}.gguf"
        self._derived_dir.mkdir(parents=True, exist_ok=True)
        try:
            write_adapter(load_adapter(adapter_dir), self._shape, path)
            self._llama.set_adapter(path)
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._llama.close()

    def _reset(self) -> None:
        self._llama.clear()
        self._slots = SlotTable(self._width)
        self._free = list(range(self._width - 1, -1, -1))
        self._rows: dict[int, tuple[_Group, int]] = {}
        self._groups: list[_Group] = []
        self._held: GroupRequest | None = None
        self._used_cells = 0

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        self._reset()
        while True:
            events: list[EngineEvent] = []
            self._admit(groups, events)
            self._start_rows(events)
            self._step(events)
            if not events and not self._groups and self._held is None:
                return
            yield events

    def cancel(self, lease_id: int) -> None:
        if self._held is not None and self._held.lease_id == lease_id:
            self._held = None
        for group in [group for group in self._groups if group.request.lease_id == lease_id]:
            group.pending.clear()
            for slot in [slot for slot, _ in group.waiting]:
                self._release(slot, group)
            group.waiting.clear()
            for slot in [slot for slot, (owner, _) in self._rows.items() if owner is group]:
                self._slots.drop(slot)
                del self._rows[slot]
                group.running -= 1
                self._release(slot, group)
            self._retire(group)

    # Admission

    def _admit(self, groups: Iterator[GroupRequest], events: list[EngineEvent]) -> None:
        """Gives free slots to the partly started group, then to new ones, while their longest completions fit."""
        while self._free:
            group = self._groups[-1] if self._groups and self._groups[-1].pending else self._next_group(groups, events)
            if group is None:
                return
            while self._free and group.pending and self._fits(group.row_cells):
                group.waiting.append((self._free.pop(), group.pending.popleft()))
                self._used_cells += group.row_cells
            if group.pending:
                return

    def _next_group(self, groups: Iterator[GroupRequest], events: list[EngineEvent]) -> _Group | None:
        request, self._held = self._held or next(groups, None), None
        while request is not None:
            try:
                check_request(request, vocab_size=self._shape.vocab_size, max_positions=self._max_length)
            except BackendError as error:
                events.append(GroupFailed.of(request.lease_id, error))
                request = next(groups, None)
                continue
            if not self._fits(len(request.prompt_ids) + request.max_tokens - 1):
                self._held = request
                return None
            group = _Group(request=request, started_at=time.perf_counter(), pending=deque(request.indices))
            self._used_cells += len(request.prompt_ids)
            self._groups.append(group)
            return group
        return None

    @property
    def _max_length(self) -> int:
        return min(self._shape.max_positions, self._cells)

    def _fits(self, cells: int) -> bool:
        alone = len(self._free) == self._width
        return self._used_cells + cells <= (self._cells if alone else min(self._cells, _COMFORTABLE_CELLS))

    def _release(self, slot: int, group: _Group) -> None:
        self._llama.remove_sequence(slot)
        self._free.append(slot)
        self._used_cells -= group.row_cells

    def _retire(self, group: _Group) -> None:
        """Forgets the group if nothing of it is left."""
        if group.pending or group.waiting or group.running:
            return
        if group.kept:
            self._llama.remove_sequence(self._width)
        self._used_cells -= len(group.request.prompt_ids)
        self._groups.remove(group)

    # Stepping

    def _start_rows(self, events: list[EngineEvent]) -> None:
        """Starts the waiting rollouts of every group whose prompt is decoded, and draws their first tokens."""
        ready = [group for group in self._groups if group.waiting and group.first_logits is not None]
        if not ready:
            return
        starting = []
        source_rows = []
        for number, group in enumerate(ready):
            self._share_prompt(group)
            for slot, index in group.waiting:
                self._slots.start(slot, group.request, index)
                self._rows[slot] = (group, index)
                starting.append(slot)
                source_rows.append(number)
            group.running += len(group.waiting)
            group.waiting.clear()
        logits = np.concatenate([group.first_logits for group in ready if group.first_logits is not None])
        self._draw(logits, np.array(source_rows), np.array(starting), events)

    def _share_prompt(self, group: _Group) -> None:
        keeping = self._width
        source = keeping if group.kept else group.waiting[0][0]
        for slot, _ in group.waiting:
            if slot != source:
                self._llama.copy_sequence(source, slot)
        if group.pending and not group.kept:
            self._llama.copy_sequence(source, keeping)
            group.kept = True
        elif group.kept and not group.pending:
            self._llama.remove_sequence(keeping)
            group.kept = False

    def _step(self, events: list[EngineEvent]) -> None:
        """One decode: the next token of every active slot, and as much of the waiting prompts as fits."""
        slots = np.flatnonzero(self._slots.active)
        tokens, positions, sequences = [self._slots.token[slots]], [self._slots.position[slots]], [slots]
        wanted = [np.ones(len(slots), np.bool_)]
        completed = []
        room = self._batch_tokens - len(slots)
        for group in self._groups:
            prompt = group.request.prompt_ids
            piece = prompt[group.prefilled : group.prefilled + room]
            if group.first_logits is not None or len(piece) == 0:
                continue
            begin, group.prefilled = group.prefilled, group.prefilled + len(piece)
            room -= len(piece)
            tokens.append(piece)
            positions.append(np.arange(begin, group.prefilled, dtype=np.int32))
            sequences.append(np.full(len(piece), group.waiting[0][0]))
            is_last = np.zeros(len(piece), np.bool_)
            if group.prefilled == len(prompt):
                is_last[-1] = True
                completed.append(group)
            wanted.append(is_last)
        if len(slots) == 0 and len(tokens) == 1:
            return
        logits = self._llama.decode(
            np.concatenate(tokens), np.concatenate(positions), np.concatenate(sequences), np.concatenate(wanted)
        )
        for number, group in enumerate(completed, start=len(slots)):
            group.first_logits = logits[number : number + 1].copy()
        self._draw(logits, np.arange(len(slots)), slots, events)

    def _draw(
        self, logits: NDArray[np.float32], rows: NDArray[np.int64], slots: NDArray[np.int64], events: list[EngineEvent]
    ) -> None:
        if len(slots) == 0:
            return
        tokens, logprobs = draw_rows(logits, rows, self._slots.next_uniforms(slots), self._slots.temperature[slots])
        if not np.isfinite(logprobs).all():
            raise BackendError(
                "The model computed values that are not numbers.", got=f"{len(slots)} rollouts in progress"
            )
        now = time.perf_counter()
        for slot in self._slots.record(slots, tokens, logprobs).tolist():
            group, index = self._rows.pop(slot)
            completion_ids, behavior_logprobs, reason = self._slots.take(slot)
            events.append(
                FinishedRollout(
                    lease_id=group.request.lease_id,
                    group_id=group.request.group_id,
                    index=index,
                    policy_version=group.request.policy_version,
                    completion_ids=completion_ids,
                    behavior_logprobs=behavior_logprobs,
                    finish_reason=reason,
                    sampling_s=now - group.started_at,
                )
            )
            group.running -= 1
            self._release(slot, group)
            self._retire(group)


def _precision(base_dir: Path, requested: str) -> Precision:
    """Exact where that is cheap; else 16 bits while the weights take up to a third of the memory; else 8."""
    if requested in ("f32", "f16", "q8_0"):
        return requested  # type: ignore[return-value]
    if requested != "auto":
        raise BackendError(
            "llama.cpp does not have this precision here.", got=requested, do="Use one of auto, f32, f16, q8_0."
        )
    stored_bytes = sum(file.stat().st_size for file in base_dir.glob("*.safetensors"))
    if 2 * stored_bytes <= _F32_MODEL_BYTES:
        return "f32"
    return "f16" if stored_bytes <= psutil.virtual_memory().total // 3 else "q8_0"
