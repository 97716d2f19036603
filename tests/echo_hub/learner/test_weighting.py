from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.weighting import advantages, weigh

MakeSettings = Callable[..., LearnerSettings]
KINDS = ("mean", "mean_std", "batch_std", "leave_one_out")
REWARDS = st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=6), min_size=1, max_size=5)


def rollout(length: int, reward: float, *, truncated: bool = False, mask: Sequence[int] = ()) -> TrainingRollout:
    length = len(mask) or length
    return TrainingRollout(
        completion_ids=np.ones(length, dtype=np.int32),
        loss_mask=np.array(mask, dtype=bool) if mask else np.ones(length, dtype=bool),
        behavior_logprobs=np.zeros(length, dtype=np.float32),
        reward=reward,
        truncated=truncated,
    )


def group(*rollouts: TrainingRollout) -> TrainingGroup:
    return TrainingGroup(prompt_ids=np.array([5], dtype=np.int32), rollouts=rollouts)


STEP = [
    group(rollout(1, 1.0), rollout(3, 0.0)),
    group(rollout(2, 0.0), rollout(2, 4.0), rollout(4, 2.0)),
    group(rollout(5, 1.0), rollout(3, 1.0)),
]
"""20 tokens, 7 rollouts, 3 groups, the last without advantage."""


def weights_of(groups: Sequence[TrainingGroup], settings: LearnerSettings) -> list[list[float]]:
    return [[rollout.weight for rollout in group.rollouts] for group in weigh(groups, settings).groups]


def advantages_of(groups: Sequence[TrainingGroup], settings: LearnerSettings) -> list[list[float]]:
    return [[rollout.advantage for rollout in group.rollouts] for group in weigh(groups, settings).groups]


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("mean", [-1, 1, 0], [0.5, -0.5]),
        ("mean_std", [-1 / 1.0001, 1 / 1.0001, 0], [0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)]),
        ("leave_one_out", [-1.5, 1.5, 0], [1, -1]),
    ],
)
def test_advantages_by_hand(kind: str, first: list[float], second: list[float]) -> None:
    found = advantages([np.array([0.0, 2.0, 1.0]), np.array([1.0, 0.0])], kind)
    assert [values.tolist() for values in found] == [pytest.approx(first), pytest.approx(second)]


def test_batch_std_divides_by_the_deviation_of_the_whole_step() -> None:
    found = advantages([np.array([0.0, 2.0]), np.array([5.0, 5.0])], "batch_std")
    std = np.std([0.0, 2.0, 5.0, 5.0], ddof=1) + 1e-4
    assert found[0].tolist() == pytest.approx([-1 / std, 1 / std])
    assert found[1].tolist() == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
@given(reward=st.floats(-1e6, 1e6), size=st.integers(1, 9), others=REWARDS)
def test_equal_rewards_have_exactly_no_advantage(
    kind: str, reward: float, size: int, others: list[list[float]]
) -> None:
    # 0.1 summed seven times and divided by seven is not 0.1 in floating point.
    found = advantages([np.full(size, reward), *map(np.array, others)], kind)
    assert not found[0].any()
    assert all(np.isfinite(values).all() for values in found)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_no_advantage(kind: str) -> None:
    assert not advantages([np.array([0.1 + 0.2, 0.3, 0.3, 0.3])], kind)[0].any()


@pytest.mark.parametrize("kind", KINDS)
@given(rewards=REWARDS, shift=st.floats(-10, 10))
def test_advantages_add_up_to_nothing_and_do_not_know_the_level(
    kind: str, rewards: list[list[float]], shift: float
) -> None:
    arrays = [np.round(np.array(values), 3) for values in rewards]
    assert all(abs(values.sum()) < 1e-8 for values in advantages(arrays, kind))
    if kind != "batch_std":  # There the groups' levels are part of the deviation.
        moved = advantages([values + round(shift, 3) for values in arrays], kind)
        for before, after in zip(advantages(arrays, kind), moved, strict=True):
            np.testing.assert_allclose(before, after, atol=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token_mean", [[1 / 20] * 2, [1 / 20] * 2]),
        ("sequence_mean", [[1 / 7, 1 / 21], [1 / 14, 1 / 14]]),
        ("group_mean", [[1 / 12] * 2, [1 / 24] * 2]),
        ("constant", [[1 / 42] * 2, [1 / 42] * 2]),
    ],
)
def test_aggregations_by_hand(make_settings: MakeSettings, aggregation: str, weights: list[list[float]]) -> None:
    """What has no advantage, a rollout or a group, is not computed and counts in the denominators."""
    settings = make_settings(objective={"aggregation": aggregation, "advantage": "mean"})
    assert weights_of(STEP, settings) == [pytest.approx(expected) for expected in weights]
    assert advantages_of(STEP, settings) == [[0.5, -0.5], [-2, 2]]
    found = weigh(STEP, settings)
    assert (found.groups_without_advantage, found.rollouts_masked, found.rollouts_unselected) == (1, 0, 0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "group_mean"])
def test_a_mean_has_weights_that_add_up_to_one(make_settings: MakeSettings, aggregation: str) -> None:
    settings = make_settings(objective={"aggregation": aggregation, "kl_coefficient": 0.1})
    total = sum(r.weight * r.loss_mask.sum() for group in weigh(STEP, settings).groups for r in group.rollouts)
    assert total == pytest.approx(1)


def test_with_a_kl_weight_everything_is_computed(make_settings: MakeSettings) -> None:
    settings = make_settings(objective={"name": "dapo", "kl_coefficient": 0.1})
    found = weigh(STEP, settings)
    assert [len(group.rollouts) for group in found.groups] == [2, 3, 2]
    assert found.groups_without_advantage == 1


def test_the_papers_choices_hold_unless_others_are_made(make_settings: MakeSettings) -> None:
    assert weights_of(STEP, make_settings(objective={"name": "dr_grpo"}))[0] == pytest.approx([1 / 42] * 2)
    assert advantages_of(STEP, make_settings(objective={"name": "dr_grpo"}))[1] == [-2, 2]
    chosen = make_settings(objective={"name": "dr_grpo", "aggregation": "token_mean", "advantage": "mean_std"})
    assert weights_of(STEP, chosen)[0] == pytest.approx([1 / 20] * 2)
    assert advantages_of(STEP, chosen)[1] == pytest.approx([-2 / 2.0001, 2 / 2.0001])


def test_a_token_budget_is_the_denominator(make_settings: MakeSettings) -> None:
    settings = make_settings(training={"tokens_per_step": 64})
    assert weights_of(STEP, settings) == [[1 / 64] * 2, [1 / 64] * 2]


def test_tokens_of_an_environment_do_not_count(make_settings: MakeSettings) -> None:
    step = [group(rollout(0, 1.0, mask=[1, 0, 0, 1]), rollout(3, 0.0))]
    assert weights_of(step, make_settings(objective={"aggregation": "token_mean"})) == [[1 / 5] * 2]
    assert weights_of(step, make_settings(objective={"aggregation": "sequence_mean"}))[0] == pytest.approx(
        [1 / 4, 1 / 6]
    )


def test_masked_rollouts_leave_the_loss_and_stay_in_the_advantages(make_settings: MakeSettings) -> None:
    step = [
        group(rollout(1, 1.0), rollout(6, 0.0, truncated=True), rollout(3, 0.0)),
        group(rollout(2, 1.0), rollout(2, 1.0)),
    ]
    settings = make_settings(objective={"overlong": "mask", "aggregation": "token_mean", "advantage": "mean"})
    found = weigh(step, settings)
    assert found.rollouts_masked == 1
    assert weights_of(step, settings) == [pytest.approx([1 / 8] * 2)], "the denominator is without it"
    assert advantages_of(step, settings) == [pytest.approx([2 / 3, -1 / 3])], "the mean is with it"


def test_a_step_of_nothing_but_masked_rollouts_is_empty(make_settings: MakeSettings) -> None:
    step = [group(rollout(6, 1.0, truncated=True), rollout(6, 0.0, truncated=True))]
    for aggregation in ("token_mean", "sequence_mean", "group_mean", "constant"):
        assert weigh(step, make_settings(objective={"overlong": "mask", "aggregation": aggregation})).groups == ()


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (2, 0.0), (3, -0.25), (4, -0.5), (5, -0.75), (6, -1.0), (9, -1.0)]
)
def test_the_soft_penalty_by_hand(make_settings: MakeSettings, length: int, penalty: float) -> None:
    """sampling.max_tokens is 6, the buffer 4; the other rollout has reward 0 and no penalty."""
    objective = {"overlong": "penalty", "overlong_buffer_tokens": 4, "advantage": "mean"}
    found = advantages_of([group(rollout(length, 2.0), rollout(1, 0.0))], make_settings(objective=objective))
    assert found == [pytest.approx([(2 + penalty) / 2, -(2 + penalty) / 2])]


def test_the_penalty_is_for_the_last_turn(make_settings: MakeSettings) -> None:
    objective = {"overlong": "penalty", "overlong_buffer_tokens": 4, "advantage": "mean"}
    turns = rollout(0, 2.0, mask=[1, 1, 1, 1, 1, 0, 1, 1, 1])
    found = advantages_of([group(turns, rollout(1, 0.0))], make_settings(objective=objective))
    assert found == [pytest.approx([1.75 / 2, -1.75 / 2])]


def test_selection_counts_and_shares_the_denominator(make_settings: MakeSettings) -> None:
    step = [group(rollout(1, 4.0), rollout(2, 2.0), rollout(3, 1.0), rollout(4, -3.0))]
    settings = make_settings(objective={"selection": "shuffle_r1", "aggregation": "token_mean", "advantage": "mean"})
    assert advantages_of(step, settings) == [[3, -4]], "of the whole group's mean"
    assert weights_of(step, settings) == [[1 / 5] * 2]
    assert weigh(step, settings).rollouts_unselected == 2


def test_what_is_cut_off_is_not_selected(make_settings: MakeSettings) -> None:
    step = [group(rollout(1, 4.0), rollout(2, 2.0), rollout(3, 1.0), rollout(6, -3.0, truncated=True))]
    objective = {"selection": "shuffle_r1", "overlong": "mask", "advantage": "mean"}
    found = weigh(step, make_settings(objective=objective))
    assert advantages_of(step, make_settings(objective=objective)) == [[3]], (
        "1 - mean is nothing, and so is not computed"
    )
    assert (found.rollouts_masked, found.rollouts_unselected) == (1, 1)
