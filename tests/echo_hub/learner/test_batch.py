from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch

from echo_hub.learner.batch import MicroBatch, build_micro_batches
from echo_hub.learner.settings import TrainingGroup
from echo_hub.learner.weighting import WeightedGroup, WeightedRollout

ANY_BUDGET = 10_000


def rollout(ids: Sequence[int], advantage: float = 1.0, *, mask: Sequence[bool] | None = None) -> WeightedRollout:
    return WeightedRollout(
        completion_ids=np.array(ids, dtype=np.int32),
        loss_mask=np.array(mask or [True] * len(ids)),
        behavior_logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
        advantages=np.full(np.count_nonzero(mask) if mask else len(ids), advantage),
        weight=0.25,
    )


def group(prompt: Sequence[int], *rollouts: WeightedRollout) -> WeightedGroup:
    return WeightedGroup(prompt_ids=np.array(prompt, dtype=np.int32), rollouts=rollouts)


def weighted(groups: Sequence[TrainingGroup]) -> list[WeightedGroup]:
    return [
        group(g.prompt_ids.tolist(), *(rollout(r.completion_ids.tolist(), r.reward) for r in g.rollouts))
        for g in groups
    ]


def rows_of(batch: MicroBatch) -> list[list[int]]:
    return [row for ids in batch.rows.split(batch.input_ids_T[batch.rows.laid_out.index]) for row in ids.tolist()]


def test_a_micro_batch_by_hand() -> None:
    (batch,) = build_micro_batches(
        [group([7, 8], rollout([1, 2, 3]), rollout([4], -1.0), rollout([5, 6], 0.5)), group([9], rollout([1, 2]))],
        micro_batch_tokens=ANY_BUDGET,
    )
    assert batch.input_ids_T.tolist() == [7, 8, 1, 2, 5, 9, 1], "no padding, and a prompt once"
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 2, 0, 1], (
        "positions of a completion continue those of the prompt"
    )
    assert [positions.tolist() for positions in batch.rows.split(batch.rows.laid_out.index)] == [
        [[0, 1, 2, 3], [0, 1, 4, 4]],
        [[0, 1], [5, 6]],
    ]
    assert batch.rows.packed.index.tolist() == [0, 1, 2, 3, 6, 10, 11], "the prompt's own tokens are in its first row"
    assert batch.predictors_N.tolist() == [1, 2, 3, 1, 1, 4, 5, 6]
    assert batch.target_ids_N.tolist() == [1, 2, 3, 4, 5, 6, 1, 2]
    assert batch.behavior_logprobs_N.tolist() == [-1, -2, -3, -1, -1, -2, -1, -2]
    assert batch.advantages_N.tolist() == [1, 1, 1, -1, 0.5, 0.5, 1, 1]
    assert batch.weights_N.tolist() == [0.25] * 8
    assert batch.rollouts_N.tolist() == [0, 0, 0, 1, 2, 2, 3, 3]
    assert batch.lengths == (3, 1, 2, 2)


def test_tokens_that_the_policy_did_not_draw_are_read_but_not_predicted() -> None:
    (batch,) = build_micro_batches(
        [group([7], rollout([1, 2, 3, 4], mask=[True, False, False, True]))], micro_batch_tokens=ANY_BUDGET
    )
    assert batch.input_ids_T.tolist() == [7, 1, 2, 3]
    assert batch.predictors_N.tolist() == [0, 3]
    assert batch.target_ids_N.tolist() == [1, 4]
    assert batch.behavior_logprobs_N.tolist() == [-1, -4]


def test_a_prompt_is_repeated_where_its_group_is_split() -> None:
    batches = build_micro_batches([group([7, 8], rollout([1, 2]), rollout([3, 4]))], micro_batch_tokens=5)
    assert [rows_of(batch) for batch in batches] == [[[7, 8, 1]], [[7, 8, 3]]]
    assert [batch.num_rollouts for batch in batches] == [1, 1]


def test_a_rollout_that_exceeds_the_budget_goes_alone() -> None:
    batches = build_micro_batches(
        [group([7], rollout([1]), rollout([1, 2, 3, 4, 5, 6]), rollout([1]))], micro_batch_tokens=3
    )
    assert [batch.input_ids_T.tolist() for batch in batches] == [[7], [7, 1, 2, 3, 4, 5], [7]]


def largest_of_fewest(lengths: Sequence[int], budget: int) -> tuple[int, int]:
    """Try all ways to cut the list `lengths` into parts. Return the smallest number of parts within the budget, and the
    smallest possible size of the largest part for this number.
    """

    @cache
    def best(begin: int) -> tuple[int, int]:
        if begin == len(lengths):
            return 0, 0
        ends = range(begin + 1, len(lengths) + 1)
        parts = [
            (end, sum(lengths[begin:end])) for end in ends if end == begin + 1 or sum(lengths[begin:end]) <= budget
        ]
        return min((best(end)[0] + 1, max(size, best(end)[1])) for end, size in parts)

    return best(0)


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_fewest_with_the_smallest_maximum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, rng.integers(1, 16)).tolist()
    budget = int(rng.integers(10, 80))
    batches = build_micro_batches(
        [group([7], *(rollout([1] * length) for length in lengths))], micro_batch_tokens=budget
    )
    ends = np.cumsum([batch.num_rollouts for batch in batches])
    sizes = [int(part.sum()) for part in np.split(lengths, ends[:-1])]
    assert ends[-1] == len(lengths) and (len(sizes), max(sizes)) == largest_of_fewest(lengths, budget)


def test_nothing_makes_nothing() -> None:
    assert build_micro_batches([], micro_batch_tokens=64) == []


@pytest.mark.parametrize("tokens", [20, 64, ANY_BUDGET])
def test_budget_holds_and_no_token_is_lost(make_groups: Callable[[int], list[TrainingGroup]], tokens: int) -> None:
    groups = weighted([group for seed in range(4) for group in make_groups(seed)])
    batches = build_micro_batches(groups, micro_batch_tokens=tokens)
    for batch in batches:
        assert batch.num_rollouts == 1 or len(batch.input_ids_T) <= tokens
        places = batch.rows.laid_out.index[batch.rows.packed.index]
        assert torch.equal(places, torch.arange(len(batch.input_ids_T))), "there and back"
        for positions in batch.rows.split(batch.rows.laid_out.index):
            filled = [len(set(row)) for row in positions.tolist()]
            assert min(filled) >= 0.75 * positions.shape[1]
    expected = [
        (int(token), np.float32(r.advantages[0])) for g in groups for r in g.rollouts for token in r.completion_ids
    ]
    found = [
        pair for batch in batches for pair in zip(batch.target_ids_N.tolist(), batch.advantages_N.numpy(), strict=True)
    ]
    assert sorted(found) == sorted(expected)


def test_everything_moves_to_the_device() -> None:
    (batch,) = build_micro_batches([group([7], rollout([1, 2]))], micro_batch_tokens=64)
    moved = batch.to(torch.device("meta"))
    assert moved.predictors_N.is_meta and moved.num_rollouts == 1
    for gather in (moved.rows.laid_out, moved.rows.packed):
        assert gather.index.is_meta and all(values.is_meta for values in gather.sums)
