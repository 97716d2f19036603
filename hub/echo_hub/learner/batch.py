"""A step's rollouts as micro-batches of at most `micro_batch_tokens` tokens each, packed without padding.

A micro-batch is one sequence: each prompt once, followed by its completions. Position ids of every completion continue
from the end of its own prompt. `packing.Rows` tells attention which prompt and completion belong together. The result
equals that of one row per rollout (prompt and completion), without padding or repeated prompts.

The batch lists the positions that predict a trained token explicitly, from the rollouts' loss masks. It never infers
them from padding or token ids. A completion's last token is only predicted; it is not an input.

Dimensions: T positions of the packed sequence, N trained tokens, R rows of L positions, B bytes of a route.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo_hub.learner.device import moved
from echo_hub.learner.packing import Rows
from echo_hub.learner.routing import RouteRows
from echo_hub.learner.weighting import WeightedGroup, WeightedRollout
from echo_shared.sampling.draws import all_uniforms

_ROW_FILL: Final = 0.75
"""Smallest row in a rectangle, as a share of the rectangle's width. Rows of similar length are padded to one rectangle.
A padded position costs as much attention as a token, and that cost grows with the square of the row length."""


class PackedInputs(Protocol):
    """The inputs of a forward pass over packed rows. `MicroBatch` explains each attribute."""

    @property
    def input_ids_T(self) -> Tensor: ...
    @property
    def position_ids_T(self) -> Tensor: ...
    @property
    def rows(self) -> Rows: ...
    @property
    def predictors_N(self) -> Tensor: ...
    @property
    def routes_TB(self) -> Tensor | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The packed input of one forward and backward pass."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    rows: Rows
    predictors_N: Tensor
    """For each trained token, the position whose output predicts it. Positions that are not listed have no loss."""
    target_ids_N: Tensor
    behavior_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    """Weight of each token's loss. The step's loss is the sum of weight times loss over all micro-batches."""
    rollouts_N: Tensor
    """Index of each token's rollout in this micro-batch, ascending. A rollout is never split over micro-batches."""
    lengths: tuple[int, ...]
    """Number of trained tokens of each rollout."""
    uniforms_N: Tensor
    """The uniform number u with which each token was drawn, float32; NaN if unknown."""
    turns_N: Tensor
    """Turn of the rollout in which each token was drawn; 0 is the first."""
    numbers: tuple[int, ...]
    """Index of each rollout among all rollouts of the step."""
    groups: tuple[int, ...]
    """Index of each rollout's group among all groups of the step."""
    routes_TB: Tensor | None = None
    """Route of each position through a mixture of experts, uint8: `echo_shared.sampling.torch_routes`. Prompts have no
    route, because one copy of a prompt serves completions of several nodes. None: no rollout has routes."""

    @property
    def num_rollouts(self) -> int:
        return len(self.lengths)

    def of_groups(self, groups: Collection[int]) -> tuple[MicroBatch, Tensor]:
        """Return a copy with losses only for tokens of these groups, and those tokens' indices in this batch. The
        forward pass still computes all tokens.
        """
        kept_R = [group in groups for group in self.groups]
        # Search on the host, so that the host need not wait for the device.
        places = np.flatnonzero(np.repeat(kept_R, self.lengths))
        kept_N = moved(torch.from_numpy(places), self.rollouts_N.device)
        names = ("predictors_N", "target_ids_N", "behavior_logprobs_N", "advantages_N", "weights_N", "rollouts_N")
        of_tokens = {name: getattr(self, name)[kept_N] for name in (*names, "uniforms_N", "turns_N")}
        lengths = tuple(length * kept for length, kept in zip(self.lengths, kept_R, strict=True))
        return replace(self, **of_tokens, lengths=lengths), kept_N

    def to(self, device: torch.device) -> MicroBatch:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = moved(value, device)
        return MicroBatch(**{**values, "rows": self.rows.to(device)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    group: WeightedGroup
    rollouts: list[WeightedRollout]


def build_micro_batches(groups: Sequence[WeightedGroup], *, micro_batch_tokens: int) -> list[MicroBatch]:
    """Return micro-batches of all rollouts in `groups`, in order. A rollout longer than `micro_batch_tokens` gets a
    micro-batch of its own.

    Each rollout's tokens include its prompt, because attention computes one copy of the prompt per rollout. The number
    of micro-batches is the smallest possible, and their sizes are even, because the largest micro-batch determines a
    step's peak memory.
    """
    return [_micro_batch(families) for families in _split(groups, micro_batch_tokens)]


def halved(groups: Sequence[WeightedGroup], micro_batch_tokens: int) -> int | None:
    """Return a smaller `micro_batch_tokens`: half the tokens of the largest micro-batch that holds several rollouts,
    which is then split. Return None if every micro-batch holds a single rollout, which is never split.
    """
    rows = [
        [_tokens(family.group, rollout) for family in families for rollout in family.rollouts]
        for families in _split(groups, micro_batch_tokens)
    ]
    largest = max((sum(row) for row in rows if len(row) > 1), default=0)
    return max(1, largest // 2) if largest else None


def _input_tokens(rollout: WeightedRollout) -> int:
    return len(rollout.completion_ids) - 1


def _tokens(group: WeightedGroup, rollout: WeightedRollout) -> int:
    return len(group.prompt_ids) + _input_tokens(rollout)


def evened(tokens: Sequence[int], micro_batch_tokens: int) -> int:
    """Return the smallest `micro_batch_tokens` that packs rollouts of these lengths (in tokens) into no more
    micro-batches than the given one.
    """

    def count(budget: int) -> int:
        found, total = 1, 0
        for each in tokens:
            if total and total + each > budget:
                found, total = found + 1, 0
            total += each
        return found

    most = count(micro_batch_tokens)
    if most in (1, len(tokens)):
        return micro_batch_tokens
    least = min(micro_batch_tokens, -(-sum(tokens) // most))
    return bisect_left(range(micro_batch_tokens), True, lo=least, key=lambda budget: count(budget) <= most)


def _split(groups: Sequence[WeightedGroup], micro_batch_tokens: int) -> Iterator[list[_Family]]:
    budget = evened([_tokens(group, rollout) for group in groups for rollout in group.rollouts], micro_batch_tokens)
    families: list[_Family] = []
    total = 0
    for group in groups:
        family = _Family(group=group, rollouts=[])
        for rollout in group.rollouts:
            tokens = _tokens(group, rollout)
            if total and total + tokens > budget:
                yield [*families, family] if family.rollouts else families
                families, total = [], 0
                family = _Family(group=group, rollouts=[])
            family.rollouts.append(rollout)
            total += tokens
        if family.rollouts:
            families.append(family)
    if families:
        yield families


def _micro_batch(families: Sequence[_Family]) -> MicroBatch:
    input_ids, position_ids, rows, predictors = [], [], [], []
    routes = RouteRows()
    end = 0
    for family in families:
        prompt_length = len(family.group.prompt_ids)
        prompt = np.arange(end, end + prompt_length)
        input_ids.append(family.group.prompt_ids)
        position_ids.append(np.arange(prompt_length))
        routes.skip(prompt_length)
        end += prompt_length
        for rollout in family.rollouts:
            length = _input_tokens(rollout)
            row = np.concatenate((prompt, np.arange(end, end + length)))
            input_ids.append(rollout.completion_ids[:-1])
            position_ids.append(np.arange(prompt_length, prompt_length + length))
            predictors.append(row[prompt_length - 1 :][rollout.loss_mask])
            rows.append(row)
            routes.add(rollout.routes, len(rollout.completion_ids), length)
            end += length
    rollouts = [rollout for family in families for rollout in family.rollouts]
    drawn = [int(rollout.loss_mask.sum()) for rollout in rollouts]
    targets = np.concatenate([rollout.completion_ids[rollout.loss_mask] for rollout in rollouts])
    logprobs = np.concatenate([rollout.behavior_logprobs[rollout.loss_mask] for rollout in rollouts])
    return MicroBatch(
        input_ids_T=torch.from_numpy(np.concatenate(input_ids).astype(np.int64)),
        position_ids_T=torch.from_numpy(np.concatenate(position_ids)),
        rows=lay_out(rows, end),
        predictors_N=torch.from_numpy(np.concatenate(predictors)),
        target_ids_N=torch.from_numpy(targets.astype(np.int64)),
        behavior_logprobs_N=torch.from_numpy(logprobs),
        advantages_N=torch.from_numpy(np.concatenate([rollout.advantages for rollout in rollouts]).astype(np.float32)),
        weights_N=_of_each([rollout.weight for rollout in rollouts], drawn),
        rollouts_N=torch.from_numpy(np.repeat(np.arange(len(rollouts)), drawn)),
        lengths=tuple(drawn),
        uniforms_N=torch.from_numpy(_uniforms(rollouts, drawn).astype(np.float32)),
        turns_N=torch.from_numpy(np.concatenate([_turns(rollout) for rollout in rollouts])),
        numbers=tuple(rollout.number for rollout in rollouts),
        groups=tuple(family.group.number for family in families for _ in family.rollouts),
        routes_TB=routes.together(),
    )


def _uniforms(rollouts: Sequence[WeightedRollout], drawn: Sequence[int]) -> NDArray[np.float64]:
    """Return the uniform random number u that drew each token [N], rollout after rollout; NaN where unknown. `drawn`
    lists the number of tokens of each rollout.
    """
    known = np.repeat([len(rollout.draws) > 0 for rollout in rollouts], drawn)
    found = np.full(len(known), np.nan)
    found[known] = all_uniforms(tuple(draw) for rollout in rollouts for draw in rollout.draws.tolist())
    return found


def _turns(rollout: WeightedRollout) -> NDArray[np.int64]:
    if not len(rollout.draws):
        return np.zeros(int(rollout.loss_mask.sum()), np.int64)
    return np.repeat(np.arange(len(rollout.draws)), rollout.draws[:, 2].astype(np.int64))


def lay_out(rows: Sequence[NDArray[np.int64]], length: int) -> Rows:
    """Group rows into rectangles, longest row first: each rectangle is as wide as its longest row. A row that would
    fill less than `_ROW_FILL` of the current rectangle's width begins a new rectangle.
    """
    rectangles: list[list[NDArray[np.int64]]] = []
    for row in sorted(rows, key=len, reverse=True):
        if not rectangles or len(row) < _ROW_FILL * len(rectangles[-1][0]):
            rectangles.append([])
        rectangles[-1].append(row)
    places_T = np.full(length, -1)
    positions_RL = []
    offset = 0
    for members in rectangles:
        width = len(members[0])
        filled = np.stack([np.pad(row, (0, width - len(row)), mode="edge") for row in members])
        for number, row in enumerate(members):
            new = row[places_T[row] < 0]
            # Positions that have no place yet: the row's completion, and also the prompt in the first row with that
            # prompt.
            places_T[new] = offset + number * width + np.arange(len(row) - len(new), len(row))
        offset += filled.size
        positions_RL.append(filled)
    return Rows.of(positions_RL, places_T)


def _of_each(values: Sequence[float], counts: Sequence[int]) -> Tensor:
    """Repeat each rollout's value for each of its tokens, float32 [N]."""
    return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), counts))
