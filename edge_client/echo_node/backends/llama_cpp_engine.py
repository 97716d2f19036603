"""llama.cpp as a sampling engine: continuous batching, each group's prompt decoded once.

Unfinished rollouts fill the first slots without gaps; a slot's number is its llama.cpp sequence. Each step feeds one
token to every rollout. Between two steps, free slots go to pending rollouts of the current group, then to new groups.

A group's prompt is decoded in one slot, the group's home, piece by piece between steps, and copied to the slots of its
rollouts. The home then serves one rollout of the group and is freed last, so a group may have more rollouts than the
engine has slots. A rollout that continues a prefix forms a separate group, whose prompt includes the prefix. If a
running rollout already holds the prompt's keys and values, they are copied instead of computed.

Some models have layers with a state of constant size, which cannot be cut back to the prompt. For them, one more
sequence keeps the state after the prompt while rollouts of the group wait.
"""

from __future__ import annotations

import bisect
import itertools
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from numpy.typing import NDArray

from echo_node.backends.base import EngineEvent, EngineSettings, GroupFailed, check_ids
from echo_node.backends.draw_rows import draw_rows
from echo_node.backends.kv_layout import CELL_STEP, KvLayout, KvPlanner
from echo_node.backends.llama_cpp_model import find_model
from echo_node.backends.llama_cpp_native import LlamaContext, ModelOptions
from echo_node.backends.scoring import intervals, joined, pieces
from echo_node.backends.threads import Threads
from echo_node.host import hardware
from echo_shared.delta.adapter import load_adapter
from echo_shared.errors import POLICY_UNUSABLE, BackendError
from echo_shared.gguf.adapter_file import write_adapter
from echo_shared.gguf.shape import read_shape
from echo_shared.gguf.summary import read_summary
from echo_shared.sampling.interface import DrawnPart, FinishedRollout, GroupRequest
from echo_shared.sampling.prefix_cache import KeptKeys, PrefixCache
from echo_shared.sampling.rollout_table import ActiveRollout, RolloutTable
from echo_shared.sampling.scoring import Intervals

DEFAULT_WIDTH: Final = 32
MAX_WIDTH: Final = 256
"""Maximum number of sequences that llama.cpp allows."""

_STATE_BYTES: Final = 4
"""Bytes of one number in a layer's state of constant size. llama.cpp stores it in 32 bits at every precision."""

_PREFILL_TOKENS: Final = 256
"""Maximum prompt tokens fed between two steps, so that a long prompt does not delay the other rollouts."""

_Start = tuple[GroupRequest, NDArray[np.int32], tuple[int, ...]]
"""A request, the tokens to feed before its first draw, and the indices of the rollouts that start with these tokens."""


@dataclass(slots=True, eq=False)
class _Group:
    """Rollouts of one request that start with the same tokens. Some of them may wait for a slot."""

    request: GroupRequest
    ids: NDArray[np.int32]
    """Tokens to feed before the first draw: the prompt, plus the prefix if the group is one rollout with a prefix."""
    started_at: float
    pending: deque[int]
    """Indices of rollouts that wait for a slot."""
    home: int
    """Slot that holds the prompt's keys and values. One rollout of the group may continue there."""
    prefilled: int = 0
    started: bool = False
    """True once a rollout has continued in the home slot, which then holds more than the prompt."""
    first_logits: NDArray[np.float32] | None = None
    """Logits after the last prompt token [1, vocabulary]; None until the whole prompt is fed."""


@dataclass(frozen=True, slots=True)
class _KeptState:
    """The keys and values of a finished sequence."""

    tokens: int
    streams: int
    """`KvLayout.streams` of the context that held the sequence."""
    state: NDArray[np.uint8]
    """The state as `LlamaContext.read_sequence` returned it."""


@dataclass(frozen=True, slots=True)
class LlamaCppPolicy:
    """An adapter prepared for llama.cpp (see `base.PreparedPolicy`)."""

    llama: LlamaContext
    adapter: Any

    def free(self) -> None:
        self.llama.free_adapter(self.adapter)


class LlamaCppEngine:
    """An engine that samples with llama.cpp. `base.Engine` describes its methods."""

    scores = True
    converted: Path | None = None

    def __init__(self) -> None:
        self._prefixes = PrefixCache[_KeptState](0, cuts=True)

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        gpu = settings.device != "cpu"
        model = find_model(base_dir, derived_dir, settings.precision, gpu=gpu)
        self.precision, self.converted = model.precision, model.path if model.is_converted else None
        self._shape = read_shape(base_dir)
        self._sizes = read_summary(model.path).sizes
        self._derived_dir = derived_dir
        self._adapter_numbers = itertools.count()
        self._width = min(settings.width or DEFAULT_WIDTH, MAX_WIDTH - self._shape.is_recurrent)
        # With a GPU or helpers, keep the number of threads fixed: `Threads` would mistake the wait for their layers for
        # a lack of cores.
        fixed = gpu or bool(settings.helpers)
        self._threads = Threads(settings.threads or hardware.sensible_threads(), fixed=fixed)
        options = ModelOptions(
            batch_tokens=max(self._width, _PREFILL_TOKENS),
            threads=self._threads.count,
            exact=model.is_exact,
            num_layers=self._shape.num_layers,
            gpu=gpu,
            helpers=settings.helpers,
            doors=settings.doors,
        )
        self._llama = LlamaContext()
        with self._threads.begun():
            self._llama.open(model.path, options)
        self._llama.set_threads(self._threads.count)
        budget = settings.kv_cache_bytes or psutil.virtual_memory().total // 4
        cell_bytes = self._shape.kv_values_per_token * (4 if model.is_exact else 2)
        affordable = budget // cell_bytes
        self._cell_bytes = cell_bytes
        self._prefixes = self._new_prefixes(settings, affordable)
        self._planner = KvPlanner(
            width=self._width,
            max_positions=self._shape.max_positions,
            vocab_size=self._shape.vocab_size,
            affordable_cells=max(CELL_STEP, affordable - affordable % CELL_STEP),
            state_cells=-(-self._shape.state_values * _STATE_BYTES // cell_bytes),
            keeps_keys=self._prefixes.max_tokens > 0,
            may_unify=not self._shape.context_changes_factors,
        )
        self._layout: KvLayout | None = None
        self._reset()
        return self._width

    def _new_prefixes(self, settings: EngineSettings, affordable_cells: int) -> PrefixCache[_KeptState]:
        """Return an empty cache for the keys and values of finished sequences. Its size is 0 if the model's states
        cannot be cut back, or if helpers hold a part of the model: keys and values would have to cross the network.
        """
        is_possible = not self._shape.is_recurrent and not settings.helpers
        share = settings.kept_keys_share if is_possible else 0.0
        return PrefixCache[_KeptState](int(share * affordable_cells), cuts=True)

    def prepare(self, adapter_dir: Path) -> LlamaCppPolicy:
        # Make the name unique: engines of the node's other devices use the same directory.
        path = self._derived_dir / f"adapter-{os.getpid()}-{next(self._adapter_numbers)}.gguf"
        self._derived_dir.mkdir(parents=True, exist_ok=True)
        try:
            write_adapter(load_adapter(adapter_dir), self._shape, self._sizes, path)
            return LlamaCppPolicy(self._llama, self._llama.load_adapter(path))
        finally:
            path.unlink(missing_ok=True)

    def set_policy(self, policy: LlamaCppPolicy | None) -> None:
        self._llama.set_adapter(None if policy is None else policy.adapter)

    @property
    def kept(self) -> KeptKeys:
        return self._prefixes.kept(self._cell_bytes)

    def forget(self, version: int | None = None) -> None:
        self._prefixes.forget(version)

    def close(self) -> None:
        self._prefixes.clear()
        self._llama.close()

    def _reset(self) -> None:
        sequences = 0 if self._layout is None else self._layout.sequences
        self._table = RolloutTable()
        """Unfinished rollouts: row n of the table is the rollout in slot n."""
        self._numbers = np.arange(sequences)
        self._keeper = sequences if self._shape.is_recurrent else None
        """Number of the extra sequence, after those of the slots, that keeps the current group's prompt if the model's
        states cannot be cut back to a prompt; None: they can.
        """
        self._free = list(range(sequences))
        """Free slots, ascending. In llama.cpp they are empty, except for the home of a group whose rollouts still wait:
        it holds the group's prompt.
        """
        self._current: _Group | None = None
        self._next: deque[_Start] = deque()
        """Parts of the current request that have not become a group yet."""

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        self._held: GroupRequest | None = None
        self._reset()
        if self._layout is not None:
            self._llama.clear()
        while True:
            events: list[EngineEvent] = []
            self._fill_slots(groups, events)
            if self._num_rows:
                self._step(events)
            elif not (self._current or self._next or self._held or events):
                return
            yield events

    def cancel(self, lease_id: int) -> None:
        if self._held is not None and self._held.lease_id == lease_id:
            self._held = None
        if self._current is not None and self._current.request.lease_id == lease_id:
            if self._current.home in self._free:
                self._llama.remove_sequence(self._current.home)
            self._end_current()
        if self._next and self._next[0][0].lease_id == lease_id:
            self._next.clear()
        cancelled = self._table.rows_of(lease_id)
        self._table.drop(cancelled)
        self._release(cancelled)

    def news(self) -> list[DrawnPart]:
        return self._table.news()

    def score(self, ids: NDArray[np.int32], first: int, temperature: float) -> Intervals:
        planner = self._planner
        check_ids(ids, vocab_size=planner.vocab_size, max_positions=planner.max_positions)
        self._make_room_to_score(len(ids))
        self._llama.clear()
        parts: list[Intervals] = []
        most = self._llama.batch_tokens
        for begin, end, wanted in pieces(len(ids), first, vocab_size=planner.vocab_size, most=most):
            if wanted:
                logits = self._llama.feed_scored(ids[begin:end], begin)
                parts.append(intervals(logits, ids[begin + 1 : end + 1], temperature))
            else:
                self._llama.feed_prompt(ids[begin:end], begin, 0)
        self._llama.clear()
        return joined(parts)

    def _make_room_to_score(self, num_tokens: int) -> None:
        """Reserve memory for one sequence of this length, in place of the sequences for sampling. The next `sample`
        reserves those again.
        """
        cells = -(-num_tokens // CELL_STEP) * CELL_STEP
        if self._layout is not None and self._layout.cells >= cells:
            return
        if cells > self._planner.affordable_cells:
            raise BackendError("The text does not fit into the memory for keys and values.", got=f"{num_tokens} tokens")
        self._layout = None
        layout = KvLayout(sequences=1, cells=cells, unified=True)
        self._llama.reserve(layout)
        self._layout = layout
        self._reset()

    @property
    def _num_rows(self) -> int:
        return len(self._numbers) - len(self._free)

    def _fill_slots(self, groups: Iterator[GroupRequest], events: list[EngineEvent]) -> None:
        """Start rollouts while slots are free, feeding at most _PREFILL_TOKENS prompt tokens, then close the gaps
        between used slots.
        """
        room = _PREFILL_TOKENS
        while (group := self._current or (self._next_group(groups, events, room) if room else None)) is not None:
            self._current = group
            if group.first_logits is None:
                if not room:
                    break
                room -= self._prefill(group, room)
            if group.first_logits is not None and self._free:
                self._start_rows(group, group.first_logits, events)
            if self._current is not None and not self._free:
                break
        self._close_gaps()

    def _next_group(self, groups: Iterator[GroupRequest], events: list[EngineEvent], room: int) -> _Group | None:
        """Return the next group, None if `groups` has no work or no slot is free. `room`: prompt tokens that may still
        be fed before the next step.
        """
        if self._layout is not None and not self._free:
            return None
        if not self._next and (request := self._next_request(groups, events)) is not None:
            self._next.extend((request, *start) for start in request.starts())
        if not self._next:
            return None
        request, ids, indices = self._next.popleft()
        if len(ids) > room:
            # Close gaps first: a prompt that is fed in several steps needs a slot (its home) behind those of all
            # running rollouts.
            self._close_gaps()
        home = self._free[0]
        prefilled = self._copy_prompt(request, ids, home)
        pending = deque(indices)
        return _Group(
            request=request, ids=ids, started_at=time.perf_counter(), pending=pending, home=home, prefilled=prefilled
        )

    def _next_request(self, groups: Iterator[GroupRequest], events: list[EngineEvent]) -> GroupRequest | None:
        """Return the next valid request that the layout fits; hold back a request that needs another layout until the
        batch has drained.
        """
        request, self._held = self._held or next(groups, None), None
        while request is not None:
            try:
                self._planner.check(request)
            except BackendError as error:
                events.append(GroupFailed.of(request.lease_id, error))
                request = next(groups, None)
                continue
            if self._has_layout_for(request):
                return request
            self._held = request
            return None
        return None

    def _copy_prompt(self, request: GroupRequest, ids: NDArray[np.int32], home: int) -> int:
        """Copy the first tokens of `ids` to the group's home: from a running rollout of the same prompt, or from the
        kept sequences. Return the number of tokens copied; at least one is left to feed.
        """
        if self._keeper is not None:
            return 0
        for slot, rollout in enumerate(self._table.rollouts):
            if rollout is None or rollout.group.group_id != request.group_id:
                continue
            # Compare the prompts: each turn of an episode has its own prompt.
            if np.array_equal(rollout.group.prompt_ids, request.prompt_ids):
                count = min(len(request.prompt_ids), len(ids) - 1)
                self._llama.copy_sequence(slot, home)
                self._llama.remove_sequence(home, count)
                return count
        count, kept = self._prefixes.take(ids, version=request.policy_version)
        layout = self._layout
        if kept is None or layout is None or kept.streams != layout.streams or kept.tokens > layout.cells:
            return 0
        if not self._llama.write_sequence(home, kept.state):
            return 0
        self._llama.remove_sequence(home, count)
        self._prefixes.reused(count)
        return count

    def _has_layout_for(self, request: GroupRequest) -> bool:
        """Return True if the layout fits the request. If no rollout runs, first change the layout where that helps."""
        wanted = self._planner.plan(request)
        if self._layout is not None:
            if self._num_rows:
                return wanted.cells <= self._layout.cells
            if self._layout.serves(wanted):
                return True
        # Clear the layout first: if the new reservation fails, the old sequences are gone too.
        self._layout = None
        self._llama.reserve(wanted)
        self._layout = wanted
        self._reset()
        return True

    def _release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            bisect.insort(self._free, slot)
            if self._current is None or self._current.home != slot:
                self._llama.remove_sequence(slot)

    def _close_gaps(self) -> None:
        """Move the last rows into free slots, because llama.cpp computes neighbouring sequences together."""
        if len(self._table) == self._num_rows:
            return
        for mover, gap in zip(*self._table.close_gaps(), strict=True):
            self._llama.copy_sequence(mover, gap)
            self._llama.remove_sequence(mover)
            self._free.remove(gap)
            bisect.insort(self._free, mover)

    def _prefill(self, group: _Group, room: int) -> int:
        """Feed the next piece of the prompt, at most `room` tokens. Return the number of tokens fed."""
        piece = group.ids[group.prefilled : group.prefilled + room]
        logits = self._llama.feed_prompt(piece, group.prefilled, group.home)
        group.prefilled += len(piece)
        if group.prefilled == len(group.ids):
            group.first_logits = logits.copy()
        return len(piece)

    def _start_rows(self, group: _Group, first_logits: NDArray[np.float32], events: list[EngineEvent]) -> None:
        """Give free slots to the group's pending rollouts, first the home (the slot that holds the group's prompt), and
        draw their first tokens.
        """
        request = group.request
        self._free.sort(key=lambda slot: slot != group.home)
        count = min(len(group.pending), len(self._free))
        starting, self._free = self._free[:count], self._free[count:]
        home_is_bare = not group.started
        group.started = True
        indices = [group.pending.popleft() for _ in starting]
        if self._keeper is None:
            self._copy_and_cut(group, starting, home_is_bare)
        else:
            self._copy_kept(group, starting, home_is_bare, self._keeper)
        if not group.pending:
            self._end_current()
        self._table.start(starting, request, indices, group.started_at)
        self._draw(first_logits, np.zeros(count, np.int64), np.array(starting), events)

    def _copy_and_cut(self, group: _Group, starting: list[int], home_is_bare: bool) -> None:
        """Copy the prompt from the group's home to these slots."""
        for slot in starting:
            if slot != group.home:
                self._llama.copy_sequence(group.home, slot)
            if not home_is_bare:
                self._llama.remove_sequence(slot, len(group.ids))

    def _copy_kept(self, group: _Group, starting: list[int], home_is_bare: bool, keeper: int) -> None:
        """Copy the prompt to these slots: from the group's home if this slot holds only the prompt, else from the
        sequence `keeper`. Copy the prompt to `keeper` if more rollouts will need it.
        """
        if home_is_bare and group.pending:
            self._llama.copy_sequence(group.home, keeper)
        for slot in starting:
            if not home_is_bare:
                # Empty the slot first: it may be the group's home, which still holds a finished rollout.
                self._llama.remove_sequence(slot)
                self._llama.copy_sequence(keeper, slot)
            elif slot != group.home:
                self._llama.copy_sequence(group.home, slot)

    def _end_current(self) -> None:
        self._current = None
        if self._keeper is not None:
            self._llama.remove_sequence(self._keeper)

    def _step(self, events: list[EngineEvent]) -> None:
        slots = self._numbers[: self._num_rows]
        inputs = self._table.next_inputs(slots)
        with self._threads.step():
            logits = self._llama.feed_rows(*inputs)
        self._llama.set_threads(self._threads.count)
        self._draw(logits, slots, slots, events)

    def _draw(
        self,
        logits_NV: NDArray[np.float32],
        rows_R: NDArray[np.int64],
        slots_R: NDArray[np.int64],
        events: list[EngineEvent],
    ) -> None:
        """Draw a token for each slot from its row of the logits. Finished rollouts free their slots."""
        tokens, logprobs = draw_rows(logits_NV, rows_R, *self._table.next_draws(slots_R))
        if not np.isfinite(logprobs).all():
            raise BackendError(
                "The model computed values that are not numbers (NaN or infinite).",
                got=f"{len(slots_R)} rollouts in progress",
                code=POLICY_UNUSABLE,
            )
        running = list(self._table.rollouts)
        finished = self._table.record(slots_R, tokens, logprobs, time.perf_counter())
        events.extend(finished.values())
        if self._prefixes.max_tokens:
            self._keep(running, finished)
        self._release(finished)

    def _keep(self, running: Sequence[ActiveRollout | None], finished: Mapping[int, FinishedRollout]) -> None:
        """Keep the keys and values of finished rollouts. `running`: the rollouts by slot, before the last draw."""
        for slot, rollout in finished.items():
            begun = running[slot]
            assert begun is not None
            if begun.group.keep_keys:
                # The last token was drawn but not fed to the model.
                fed = np.concatenate([begun.group.prompt_ids, rollout.completion_ids[:-1]])
                assert self._layout is not None
                state = _KeptState(len(fed), self._layout.streams, self._llama.read_sequence(slot))
                self._prefixes.keep(fed, state, version=rollout.policy_version)
