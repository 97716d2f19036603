"""A step's rollouts as micro-batches of at most `micro_batch_tokens` tokens each, prompts and padding included.

Short rollouts of one prompt share a row: the prompt once, then the completions side by side, each of which attends to
the prompt and itself and counts its positions from the prompt's end. That is the same computation as one row a rollout,
without the repeated prompts. Longer rollouts get a row of their own, where attention needs no mask at all: padding
stands on the right and is looked at by nobody.

Which positions predict a token that is trained on is listed, from the rollouts' own lengths; it is never inferred from
padding or from what a token is. The last token of a completion is predicted but is no input.

Dimensions: B rows, T positions in a row, N completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo_hub.learner.settings import TrainingGroup, TrainingRollout

SHARED_ROW_TOKENS: Final = 256
"""Rollouts of a group share a row up to this length: below any sliding window, and short enough that the attention
between completions, which is computed and masked, stays cheap."""

_PROMPT: Final = 0
_PADDING: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass."""

    input_ids_BT: Tensor
    position_ids_BT: Tensor
    segments_BT: Tensor | None
    """0 = prompt, 1.. = completion, -1 = padding; None when no row holds more than one completion."""
    predictors_N: Tensor
    """Position b * T + t whose output predicts the token: together, the loss mask."""
    target_ids_N: Tensor
    behavior_logprobs_N: Tensor
    advantages_N: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: None if value is None else value.to(device) for name, value in tensors.items()}
        return MicroBatch(**moved)

    def attention_mask(self) -> Tensor | None:
        """What each position attends to, bool [B, 1, T, T]; None = everything before it."""
        if self.segments_BT is None:
            return None
        query, key = self.segments_BT[:, :, None], self.segments_BT[:, None, :]
        # Padding attends to itself and what is left of it, so that no softmax is over nothing.
        return ((query == key) | (key == _PROMPT)).tril()[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A prompt and completions that follow it, each with its advantage."""

    prompt_ids: NDArray[np.int32]
    completions: list[tuple[TrainingRollout, float]]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + sum(_input_tokens(rollout) for rollout, _ in self.completions)


def build_micro_batches(
    groups: Sequence[TrainingGroup],
    advantages: Sequence[NDArray[np.float64]],
    *,
    micro_batch_tokens: int,
    shared_row_tokens: int = SHARED_ROW_TOKENS,
) -> list[MicroBatch]:
    """The groups that have an advantage, longest rows first; a row longer than the budget goes alone.

    `advantages` has an array a group, one value a rollout. `shared_row_tokens` 0 gives each rollout its own row.
    """
    rows = [
        row
        for group, values in zip(groups, advantages, strict=True)
        if values.any()
        for row in _rows(group, values, shared_row_tokens)
    ]
    rows.sort(key=lambda row: row.num_tokens, reverse=True)
    return [_micro_batch(part) for part in _split(rows, micro_batch_tokens)]


def _input_tokens(rollout: TrainingRollout) -> int:
    return len(rollout.completion_ids) - 1


def _rows(group: TrainingGroup, advantages: NDArray[np.float64], shared_row_tokens: int) -> Iterator[_Row]:
    row = _Row(prompt_ids=group.prompt_ids, completions=[])
    for rollout, advantage in zip(group.rollouts, advantages, strict=True):
        if row.completions and row.num_tokens + _input_tokens(rollout) > shared_row_tokens:
            yield row
            row = _Row(prompt_ids=group.prompt_ids, completions=[])
        row.completions.append((rollout, float(advantage)))
    yield row


def _split(rows: Sequence[_Row], micro_batch_tokens: int) -> Iterator[Sequence[_Row]]:
    """`rows` come longest first, so a part's first row says how wide it is."""
    start = 0
    while start < len(rows):
        count = max(1, micro_batch_tokens // rows[start].num_tokens)
        yield rows[start : start + count]
        start += count


def _micro_batch(rows: Sequence[_Row]) -> MicroBatch:
    shape = (len(rows), rows[0].num_tokens)
    input_ids_BT = np.zeros(shape, dtype=np.int64)
    # Padding counts on: transformers takes a position that starts anew for another sequence, and builds a mask.
    position_ids_BT = np.tile(np.arange(shape[1]), (shape[0], 1))
    segments_BT = np.full(shape, _PADDING, dtype=np.int64)
    predictors, advantages = [], []
    for b, row in enumerate(rows):
        prompt_length = end = len(row.prompt_ids)
        input_ids_BT[b, :end] = row.prompt_ids
        segments_BT[b, :end] = _PROMPT
        for segment, (rollout, advantage) in enumerate(row.completions, start=1):
            start, end = end, end + _input_tokens(rollout)
            input_ids_BT[b, start:end] = rollout.completion_ids[:-1]
            position_ids_BT[b, start:end] = np.arange(prompt_length, prompt_length + end - start)
            segments_BT[b, start:end] = segment
            predictors.append(b * shape[1] + np.concatenate(([prompt_length - 1], np.arange(start, end))))
            advantages.append(np.full(len(rollout.completion_ids), advantage, dtype=np.float32))
    rollouts = [rollout for row in rows for rollout, _ in row.completions]
    shared = any(len(row.completions) > 1 for row in rows)
    return MicroBatch(
        input_ids_BT=torch.from_numpy(input_ids_BT),
        position_ids_BT=torch.from_numpy(position_ids_BT),
        segments_BT=torch.from_numpy(segments_BT) if shared else None,
        predictors_N=torch.from_numpy(np.concatenate(predictors)),
        target_ids_N=torch.from_numpy(
            np.concatenate([rollout.completion_ids for rollout in rollouts]).astype(np.int64)
        ),
        behavior_logprobs_N=torch.from_numpy(np.concatenate([rollout.behavior_logprobs for rollout in rollouts])),
        advantages_N=torch.from_numpy(np.concatenate(advantages)),
    )
