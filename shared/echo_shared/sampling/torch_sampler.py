"""Sampling with a transformers causal LM: continuous batching, one prefill per prompt, seeded draws.

The learner (co-located mode, evaluation) and the node's torch backend share this code, so both draw the same tokens.
Import this module, `torch_draws` and `torch_cache` lazily: they import torch.

A prompt is prefilled once for all rollouts of its group; the first token of each is drawn from the prompt's logits. A
rollout with a prefix is prefilled separately, with prompt and prefix, and continues from there. A rollout that needs
more tokens gets a row of the batch. The row of a finished rollout goes to the next rollout before the next step; if
there is none, the last row moves there, so that no step computes unused rows.

The batch's composition changes a row's logits only by rounding: matrix products are blocked by the number of rows, and
attention sums over the longest row's length. In float32 the rounding is about 1e-6: about one draw in a million differs
between batches. The same groups submitted in the same way give identical rollouts.

Dimensions: P prompts, R rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo_shared.errors import POLICY_UNUSABLE, BackendError
from echo_shared.sampling import draws
from echo_shared.sampling.interface import DrawnPart, FinishedRollout, GroupRequest
from echo_shared.sampling.rollout_table import ActiveRollout, RolloutTable
from echo_shared.sampling.torch_cache import SlotCache, cache_argument, cache_of, columns_for, pads_exactly
from echo_shared.sampling.torch_draws import Choose, draw, most_likely, redraw_undecided
from echo_shared.sampling.torch_prefill import PrefillSize
from echo_shared.sampling.torch_prefix_cache import TorchPrefixCache, as_past, states_of
from echo_shared.sampling.torch_routes import Routers, packed, recording
from echo_shared.sampling.torch_step import FixedSteps, takes_boolean_masks


def sample_groups(
    model: Any,
    groups: Sequence[GroupRequest],
    choose: Choose = draw,
    *,
    width: int | None = None,
    max_cells: int | None = None,
    state_cells: int = 0,
    prefixes: TorchPrefixCache | None = None,
    routers: Routers | None = None,
) -> Iterator[FinishedRollout]:
    """Draw all rollouts of `groups` in one batch, and yield each finished rollout at once.

    `model`: a transformers causal LM, bare or wrapped by PEFT, in eval mode. `choose`: `torch_draws.most_likely` gives
    greedy completions. `width`: maximum unfinished rollouts at a time, None = all. `max_cells`: maximum tokens whose
    keys and values are held. `state_cells`: see `Batch`. `prefixes`: cache of sampled sequences; it is read and
    extended. `routers`: those of `model`, to record routes. Raises BackendError if logits are not finite.
    """
    width = sum(len(group.indices) for group in groups) if width is None else width
    batch = Batch(
        model,
        width=width,
        max_cells=max_cells,
        state_cells=state_cells,
        choose=choose,
        prefixes=prefixes,
        routers=routers,
    )
    for finished in batch.sample(iter(groups)):
        yield from finished


def greedy(
    model: Any,
    prompts: Sequence[NDArray[np.int32]],
    *,
    max_tokens: int,
    stop_ids: tuple[int, ...],
) -> list[NDArray[np.int32]]:
    """Return the greedy completion [T] of each prompt [T], in order. A stop token is the last token of its
    completion.
    """
    completions: list[NDArray[np.int32]] = [np.zeros(0, dtype=np.int32)] * len(prompts)
    groups = [
        GroupRequest(
            lease_id=0,
            group_id=number,
            indices=(0,),
            prompt_ids=prompt,
            seed=0,
            policy_version=0,
            temperature=1.0,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
        )
        for number, prompt in enumerate(prompts)
    ]
    for rollout in sample_groups(model, groups, most_likely):
        completions[rollout.group_id] = rollout.completion_ids
    return completions


@dataclass(slots=True, eq=False)
class _Waiting:
    """Unstarted rollouts of a group with the same tokens to prefill."""

    group: GroupRequest
    ids: NDArray[np.int32]
    """Prompt tokens, then the prefix tokens of a rollout that has a prefix."""
    indices: tuple[int, ...]
    started: float = 0.0
    cache: Any = None
    """Cache of all prompts that were prefilled together; None before the prefill."""
    place: int = 0
    """The prompt's row in `cache`."""
    logits: Tensor | None = None
    """Logits of the first token to draw, [1, V]."""
    routes: bytes = b""
    """Routes of the prefix tokens, if they are recorded."""

    @property
    def num_given(self) -> int:
        """Number of prefix tokens."""
        return len(self.ids) - len(self.group.prompt_ids)


class Batch:
    """Unfinished rollouts, from as many groups as fit."""

    def __init__(
        self,
        model: Any,
        *,
        width: int,
        max_cells: int | None = None,
        state_cells: int = 0,
        choose: Choose = draw,
        prefixes: TorchPrefixCache | None = None,
        fixed: bool | None = None,
        routers: Routers | None = None,
    ) -> None:
        """`width`: maximum unfinished rollouts at a time; `max_cells`: maximum tokens whose keys and values are held;
        `state_cells`: tokens that take as much memory as a row's recurrent states; `prefixes`: see `sample_groups`;
        `fixed`: compute steps at fixed shapes (`torch_step`), None = on CUDA; `routers`: those of `model`, to record
        routes.
        """
        self._model = model
        self._prefixes = prefixes
        self._width = width
        self._max_cells = max_cells
        self._state_cells = state_cells
        self._choose = choose
        self._draw_device = torch.device("cpu") if model.device.type == "mps" else model.device  # mps has no float64.
        self._pads = pads_exactly(model)
        self._slots = SlotCache(model.device)
        wanted = model.device.type == "cuda" if fixed is None else fixed
        self._fixed = wanted and takes_boolean_masks(model)
        self._routers = routers
        self._steps = FixedSteps(model, self._slots, choose, routers)
        self._table = RolloutTable()
        self._waiting: deque[_Waiting] = deque()

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[FinishedRollout]]:
        """Yield the rollouts that each step finished, often none. Groups are taken from `groups` whenever there is
        capacity.

        An iterator without a group is asked again later. The method ends when `groups` has none and no rollout is
        unfinished. Raises BackendError if logits are not finite.
        """
        while True:
            finished = self._admit(groups)
            if len(self._table):
                finished += self._step()
            elif not finished:
                return
            yield finished

    def cancel(self, lease_id: int, index: int | None = None) -> None:
        """Drop the lease's rollouts, or only the one with this index. Call this between two steps of `sample`."""
        for waiting in self._waiting:
            if waiting.group.lease_id == lease_id:
                waiting.indices = tuple(own for own in waiting.indices if index is not None and own != index)
        self._waiting = deque(waiting for waiting in self._waiting if waiting.indices)
        self._table.drop(self._table.rows_of(lease_id, index))

    def forget_steps(self) -> None:
        """Drop captured steps, because other tensors have replaced tensors that the model computes with."""
        self._steps.forget()

    def news(self) -> list[DrawnPart]:
        """Return the tokens of unfinished rollouts drawn since the last call. Call this between two steps
        of `sample`.
        """
        return self._table.news()

    @torch.inference_mode()
    def _admit(self, groups: Iterator[GroupRequest]) -> list[FinishedRollout]:
        """Start rollouts until the batch is full, `groups` is exhausted, or some rollouts finish with their first drawn
        token.
        """
        finished: list[FinishedRollout] = []
        while not finished and (taken := self._take(groups)):
            fresh = [waiting for waiting, _ in taken if waiting.cache is None]
            if fresh:
                self._prefill(fresh + self._ahead(fresh, groups))
            finished = self._begin(taken)
        self._close_gaps()
        return finished

    def _take(self, groups: Iterator[GroupRequest]) -> list[tuple[_Waiting, tuple[int, ...]]]:
        """Return the rollouts to start next: limited by free rows and by the size of one prefill."""
        taken: list[tuple[_Waiting, tuple[int, ...]]] = []
        running = len(self._table) - len(self._table.free())
        longest = self._table.longest()
        prefill = PrefillSize(pads=self._pads, prefixes=self._prefixes)
        while running < self._width:
            waiting = self._next_waiting(groups)
            if waiting is None:
                break
            group = waiting.group
            longest = max(longest, len(group.prompt_ids) + group.max_tokens)
            fits = waiting.cache is not None or prefill.add(waiting.ids, waiting.group.policy_version)
            room = max(0, self._rows_of(longest) - running) if fits else 0
            begin, waiting.indices = waiting.indices[:room], waiting.indices[room:]
            if begin:
                taken.append((waiting, begin))
                running += len(begin)
            if waiting.indices:
                self._waiting.appendleft(waiting)
                break
        return taken

    def _ahead(self, fresh: Sequence[_Waiting], groups: Iterator[GroupRequest]) -> list[_Waiting]:
        """Return waiting groups whose prompts are prefilled now, together with those of `fresh`, although they have no
        rows yet.

        A prefill of few tokens costs about as much as a step, because launching device kernels takes most of the time.
        """
        prefill = PrefillSize(pads=self._pads, prefixes=self._prefixes)
        for waiting in fresh:
            prefill.add(waiting.ids, waiting.group.policy_version)
        ahead: list[_Waiting] = []
        held = list(self._waiting)
        rollouts = sum(len(waiting.indices) for waiting in held)
        while rollouts < self._width // 2 and (group := next(groups, None)) is not None:
            held += _starts(group)
            rollouts += len(group.indices)
        self._waiting = deque(held)
        for waiting in held:
            if waiting.cache is None and waiting not in fresh:
                if not prefill.add(waiting.ids, waiting.group.policy_version):
                    break
                ahead.append(waiting)
        return ahead

    def _next_waiting(self, groups: Iterator[GroupRequest]) -> _Waiting | None:
        if not self._waiting and (group := next(groups, None)) is not None:
            self._waiting.extend(_starts(group))
        return self._waiting.popleft() if self._waiting else None

    def _rows_of(self, length: int) -> int:
        """Return how many rows of up to `length` tokens fit. Return at least 1: if memory does not suffice for one row,
        the device itself reports it.
        """
        if self._max_cells is None:
            return self._width
        return min(self._width, max(1, self._max_cells // (columns_for(length) + self._state_cells)))

    def _prefill(self, fresh: Sequence[_Waiting]) -> None:
        """Run the model on the prompts, in one batch padded on the left. Equal prompts are computed once."""
        started = time.perf_counter()
        distinct: dict[bytes, int] = {}
        places = [distinct.setdefault(one.ids.astype("<i4").tobytes(), len(distinct)) for one in fresh]
        prompts_P = [np.frombuffer(prompt, dtype="<i4") for prompt in distinct]
        lengths_P = np.array([len(prompt) for prompt in prompts_P])
        longest = int(lengths_P.max())
        ids = np.zeros((len(prompts_P), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts_P):
            ids[row, longest - len(prompt) :] = prompt
        positions = np.arange(longest) - (longest - lengths_P)[:, None]
        # Without padding, pass no mask, so that attention can use its fastest path.
        mask = _on(self._model.device, positions >= 0) if lengths_P.min() < longest else None
        firsts_P = [fresh[places.index(place)] for place in range(len(prompts_P))]
        past, columns = self._past(firsts_P)
        resumes = any(one.num_given and one.group.returns_routes for one in fresh)
        with recording(self._routers if resumes else None) as recorded:
            logits, cache = self._forward(np.stack([ids, np.maximum(positions, 0)])[:, :, columns:], mask, past)
        routes_PB = packed(recorded)
        for waiting, place in zip(fresh, places, strict=True):
            waiting.started, waiting.cache, waiting.place = started, cache, place
            waiting.logits = logits[place : place + 1]
            if routes_PB is not None and waiting.num_given <= longest - columns:
                of_prompt = routes_PB.reshape(len(prompts_P), longest - columns, -1)[place]
                waiting.routes = of_prompt[len(of_prompt) - waiting.num_given :].tobytes()

    def _past(self, waiting_P: Sequence[_Waiting]) -> tuple[Any, int]:
        """Return the cached keys and values of the first columns, padding included, and the number of those columns.

        The computed part has the same length for all prompts, so prompts with longer cached prefixes recompute some
        tokens.
        """
        if self._prefixes is None:
            return None, 0
        found_P = [self._prefixes.take(one.ids, version=one.group.policy_version) for one in waiting_P]
        computed = max(len(one.ids) - known for one, (known, _) in zip(waiting_P, found_P, strict=True))
        lengths_P = [max(0, len(one.ids) - computed) for one in waiting_P]
        columns = max(lengths_P)
        for length in lengths_P:
            self._prefixes.reused(length)
        return (as_past([states or () for _, states in found_P], lengths_P, columns), columns) if columns else (None, 0)

    def _begin(self, taken: Sequence[tuple[_Waiting, tuple[int, ...]]]) -> list[FinishedRollout]:
        """Draw the first token of each rollout, and give rows to the rollouts that need more tokens."""
        begun = [(waiting, index) for waiting, indices in taken for index in indices]
        first_u = [
            draws.group_uniforms(waiting.group.seed, indices, waiting.num_given + 1)[:, -1]
            for waiting, indices in taken
        ]
        temperatures = [waiting.group.temperature for waiting, _ in begun]
        logits = torch.cat([_expanded(waiting.logits, len(indices)) for waiting, indices in taken])
        tokens, logprobs = self._draw(logits, np.stack([np.concatenate(first_u), temperatures]))
        finished = []
        staying = []
        ended: dict[int, _Waiting] = {}
        now = time.perf_counter()
        for number, (waiting, index) in enumerate(begun):
            if tokens[number] in waiting.group.stop_ids or waiting.group.max_tokens == waiting.num_given + 1:
                finished.append(_ended_at_once(waiting, index, tokens[number], logprobs[number], now))
                ended[id(waiting)] = waiting
            else:
                staying.append(number)
        rows = self._rows_for([begun[number][0] for number in staying])
        for waiting, members in groupby(zip(rows, staying, strict=True), key=lambda member: begun[member[1]][0]):
            places, numbers = zip(*members, strict=True)
            indices = [begun[number][1] for number in numbers]
            self._table.start(places, waiting.group, indices, waiting.started, waiting.routes)
        self._table.record(np.array(rows, dtype=np.int64), tokens[staying], logprobs[staying], now)
        if self._prefixes is not None:
            _keep_prompts(self._prefixes, ended.values())
        return finished

    def _rows_for(self, joining: Sequence[_Waiting]) -> list[int]:
        """Copy the keys and values of the prompts of `joining` into free rows, then into new rows; return the rows."""
        if not joining:
            return []
        longest = max(len(waiting.group.prompt_ids) + waiting.group.max_tokens for waiting in joining)
        self._reserve(len(joining), max(longest, self._table.longest()))
        free, end = self._table.free(), len(self._table)
        rows = (free + list(range(end, end + len(joining))))[: len(joining)]
        by_cache: dict[int, list[int]] = {}
        for number, waiting in enumerate(joining):
            by_cache.setdefault(id(waiting.cache), []).append(number)
        for numbers in by_cache.values():
            self._slots.join(
                joining[numbers[0]].cache,
                [joining[number].place for number in numbers],
                [rows[number] for number in numbers],
                [len(joining[number].ids) for number in numbers],
            )
        return rows

    def _reserve(self, joining: int, longest: int) -> None:
        slots = self._slots
        rows = len(self._table) - len(self._table.free()) + joining
        columns = columns_for(longest)
        if rows <= slots.rows and columns <= slots.columns:
            return
        self._close_gaps()
        rows = min(self._rows_of(longest), max(rows, 2 * slots.rows) if rows > slots.rows else slots.rows)
        if self._max_cells is None or rows * (slots.columns + self._state_cells) <= self._max_cells:
            columns = max(columns, slots.columns)
        slots.reserve(rows, columns)

    def _close_gaps(self) -> None:
        if self._table.free():
            sources, targets = self._table.close_gaps()
            self._slots.move(sources, targets, len(self._table))

    @torch.inference_mode()
    def _step(self) -> list[FinishedRollout]:
        rows = np.arange(len(self._table))
        inputs = np.stack(self._table.next_inputs(rows), dtype=np.int64)
        drawing = np.stack(self._table.next_draws(rows))
        routers = self._routers if self._table.returns_routes else None
        if self._fixed and self._slots.holds_every_token:
            tokens, logprobs = _checked(self._steps.step(inputs, drawing))
            routes_RB = self._steps.routes_RB if routers else None
        else:
            mask = self._slots.before_step()
            with recording(routers) as recorded:
                logits, _ = self._forward(inputs[:, :, None], mask, self._slots.cache)
            self._slots.after_step()
            tokens, logprobs = self._draw(logits, drawing)
            routes_RB = packed(recorded)
        running = list(self._table.rollouts) if self._prefixes is not None else []
        finished = self._table.record(rows, tokens, logprobs, time.perf_counter(), routes_RB)
        if self._prefixes is not None:
            self._keep(self._prefixes, running, finished)
        return list(finished.values())

    def _keep(
        self,
        prefixes: TorchPrefixCache,
        running: Sequence[ActiveRollout | None],
        finished: Mapping[int, FinishedRollout],
    ) -> None:
        """Cache the keys and values of finished rollouts. `running`: the rollout in each row of the
        batch, before the step that finished them.
        """
        for row, rollout in finished.items():
            begun = running[row]
            assert begun is not None
            if begun.group.keep_keys and (states := self._slots.states(row)) is not None:
                # The last token was drawn but not fed to the model, so its keys and values do not exist.
                fed = np.concatenate([begun.group.prompt_ids, rollout.completion_ids[:-1]])
                prefixes.keep(fed, states, version=rollout.policy_version)

    def _forward(self, inputs: NDArray[np.int64], mask: Tensor | None, cache: Any) -> tuple[Tensor, Any]:
        """Run the model on token ids and positions [2, R, T]; return the last tokens' logits [R, V] and the cache."""
        ids, positions = _on(self._model.device, inputs)
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **cache_argument(cache),
        )
        return output.logits[:, -1], cache_of(output)

    def _draw(self, logits: Tensor, drawing: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Draw with uniforms and temperatures [2, R]: one transfer to the device and one back."""
        u_R, temperature_R = _on(self._draw_device, drawing)
        tokens_R, logprobs_R = self._choose(logits, u_R, temperature_R)
        drawn = torch.stack([tokens_R.double(), logprobs_R.double()]).numpy(force=True)
        redraw_undecided(drawn, logits, u_R, temperature_R)
        return _checked(drawn)


def _checked(drawn: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the token ids and log-probabilities of `drawn` [2, R]."""
    if not np.isfinite(drawn[1]).all():
        raise BackendError(
            "The model produced logits that are not finite.",
            do="Check the model's weights.",
            code=POLICY_UNUSABLE,
        )
    return drawn[0].astype(np.int64), drawn[1]


def _on(device: torch.device, array: NDArray[Any]) -> Tensor:
    """Copy to the device, asynchronously from pinned memory on CUDA."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _starts(group: GroupRequest) -> list[_Waiting]:
    return [_Waiting(group, ids, indices) for ids, indices in group.starts()]


def _ended_at_once(waiting: _Waiting, index: int, token: np.int64, logprob: np.float64, now: float) -> FinishedRollout:
    """Return a rollout that ended with its first drawn token."""
    before = next((prefix for prefix in waiting.group.prefixes if prefix.index == index), None)
    ids_T, logprobs_T = np.array([token], np.int32), np.array([logprob], np.float32)
    if before is not None:
        ids_T, logprobs_T = np.append(before.ids, ids_T), np.append(before.logprobs, logprobs_T)
    rollout = ActiveRollout.behind(waiting.group, index, waiting.started, waiting.num_given, waiting.routes)
    return rollout.finished(ids_T, logprobs_T, now)


def _keep_prompts(prefixes: TorchPrefixCache, ended: Iterable[_Waiting]) -> None:
    """Cache the keys and values of the prompts of rollouts that ended with their first drawn token."""
    for waiting in ended:
        if waiting.group.keep_keys:
            states = states_of(waiting.cache, waiting.place, len(waiting.ids))
            if states is not None:
                prefixes.keep(waiting.ids, states, version=waiting.group.policy_version)


def _expanded(logits: Tensor | None, rows: int) -> Tensor:
    assert logits is not None, "the prompt is prefilled"
    return logits.expand(rows, -1)
