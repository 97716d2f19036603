from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from echo_hub.learner.batch import MicroBatch, build_micro_batches
from echo_hub.learner.grpo import group_advantages
from echo_hub.learner.settings import TrainingGroup, TrainingRollout


def advantages_of(groups: Sequence[TrainingGroup]) -> list[np.ndarray]:
    return [group_advantages(np.array([rollout.reward for rollout in group.rollouts])) for group in groups]


def build(groups: Sequence[TrainingGroup], tokens: int = 10_000, shared: int = 256) -> list[MicroBatch]:
    return build_micro_batches(groups, advantages_of(groups), micro_batch_tokens=tokens, shared_row_tokens=shared)


def group(prompt: list[int], *completions: tuple[list[int], float]) -> TrainingGroup:
    rollouts = [
        TrainingRollout(
            completion_ids=np.array(ids, dtype=np.int32),
            behavior_logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
            reward=reward,
        )
        for ids, reward in completions
    ]
    return TrainingGroup(prompt_ids=np.array(prompt, dtype=np.int32), rollouts=tuple(rollouts))


def test_a_shared_row_by_hand() -> None:
    (batch,) = build([group([7, 8], ([1, 2, 3], 1.0), ([4], 0.0), ([5, 6], 0.5))])
    assert batch.input_ids_BT.tolist() == [[7, 8, 1, 2, 5]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.segments_BT is not None and batch.segments_BT.tolist() == [[0, 0, 1, 1, 3]]
    assert batch.predictors_N.tolist() == [1, 2, 3, 1, 1, 4]
    assert batch.target_ids_N.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.behavior_logprobs_N.tolist() == [-1, -2, -3, -1, -1, -2]
    np.testing.assert_allclose(batch.advantages_N, [0.5, 0.5, 0.5, -0.5, 0, 0], atol=1e-7)


def test_attention_within_a_shared_row() -> None:
    (batch,) = build([group([7, 8], ([1, 2, 3], 1.0), ([5, 6], 0.0)), group([9], ([1, 2], 1.0), ([3], 0.0))])
    mask = batch.attention_mask()
    assert mask is not None and mask.shape == (2, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert not mask[1, 0, :2, 2:].any(), "nothing real attends to padding"
    assert mask.any(dim=-1).all(), "no softmax is over nothing"


def test_rows_of_their_own_need_no_mask() -> None:
    (batch,) = build([group([7, 8], ([1, 2, 3], 1.0), ([5], 0.0))], shared=0)
    assert batch.attention_mask() is None
    assert batch.input_ids_BT.tolist() == [[7, 8, 1, 2], [7, 8, 0, 0]]
    assert batch.predictors_N.tolist() == [1, 2, 3, 5]


def test_groups_without_advantage_cost_nothing() -> None:
    assert build([group([7], ([1, 2], 0.5), ([3], 0.5))]) == []


@pytest.mark.parametrize("shared", [0, 12, 256])
@pytest.mark.parametrize("tokens", [20, 64, 10_000])
def test_budget_holds_with_padding_and_no_token_is_lost(
    make_groups: Callable[[int], list[TrainingGroup]], tokens: int, shared: int
) -> None:
    groups = [group for seed in range(4) for group in make_groups(seed)]
    batches = build(groups, tokens=tokens, shared=shared)
    assert all(batch.input_ids_BT.numel() <= tokens or len(batch.input_ids_BT) == 1 for batch in batches)
    widths = [batch.input_ids_BT.shape[1] for batch in batches]
    assert widths == sorted(widths, reverse=True)
    expected = [
        pair
        for group, values in zip(groups, advantages_of(groups), strict=True)
        if values.any()
        for rollout, value in zip(group.rollouts, values, strict=True)
        for pair in zip(rollout.completion_ids.tolist(), [np.float32(value)] * len(rollout.completion_ids), strict=True)
    ]
    found = [
        pair for batch in batches for pair in zip(batch.target_ids_N.tolist(), batch.advantages_N.numpy(), strict=True)
    ]
    assert sorted(found) == sorted(expected)


def test_a_token_that_looks_like_padding_is_trained_on() -> None:
    (batch,) = build([group([0, 0], ([0, 0, 0], 1.0), ([5], 0.0))], shared=0)
    assert batch.predictors_N.tolist() == [1, 2, 3, 5]
    assert torch.equal(batch.target_ids_N, torch.tensor([0, 0, 0, 5]))
