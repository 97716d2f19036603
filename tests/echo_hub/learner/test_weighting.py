from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.weighting import weigh
from echo_shared.wire.messages import FinishReason

MakeSettings = Callable[..., LearnerSettings]


def rollout(length: int, reward: float, *, truncated: bool = False, mask: Sequence[int] = ()) -> TrainingRollout:
    length = len(mask) or length
    return TrainingRollout(
        completion_ids=np.ones(length, dtype=np.int32),
        loss_mask=np.array(mask, dtype=bool) if mask else np.ones(length, dtype=bool),
        behavior_logprobs=np.zeros(length, dtype=np.float32),
        reward=reward,
        finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
        sampling_s=0.0,
    )


def group(*rollouts: TrainingRollout) -> TrainingGroup:
    return TrainingGroup(prompt_ids=np.array([5], dtype=np.int32), rollouts=rollouts)


STEP = [
    group(rollout(1, 1.0), rollout(3, 0.0)),
    group(rollout(2, 0.0), rollout(2, 4.0), rollout(4, 2.0)),
    group(rollout(5, 1.0), rollout(3, 1.0)),
]
"""A step of 20 tokens, 7 rollouts and 3 groups; the last group has equal rewards, and so no advantage."""


def weights_of(groups: Sequence[TrainingGroup], settings: LearnerSettings) -> list[list[float]]:
    return [[rollout.weight for rollout in group.rollouts] for group in weigh(groups, settings).updates[0]]


def advantages_of(groups: Sequence[TrainingGroup], settings: LearnerSettings) -> list[list[float]]:
    found = [[rollout.advantages for rollout in group.rollouts] for group in weigh(groups, settings).updates[0]]
    assert all(len(set(values)) == 1 for of_group in found for values in of_group)
    return [[float(values[0]) for values in of_group] for of_group in found]


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
    """Rollouts and groups without advantage are not computed, but count in the denominators."""
    settings = make_settings(objective={"aggregation": aggregation, "advantage": "mean"})
    assert weights_of(STEP, settings) == [pytest.approx(expected) for expected in weights]
    assert advantages_of(STEP, settings) == [[0.5, -0.5], [-2, 2]]
    found = weigh(STEP, settings)
    assert (found.groups_without_advantage, found.rollouts_masked, found.rollouts_unselected) == (1, 0, 0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "group_mean"])
def test_a_mean_has_weights_that_add_up_to_one(make_settings: MakeSettings, aggregation: str) -> None:
    settings = make_settings(objective={"aggregation": aggregation, "kl_coefficient": 0.1})
    total = sum(r.weight * r.loss_mask.sum() for group in weigh(STEP, settings).updates[0] for r in group.rollouts)
    assert total == pytest.approx(1)


def test_with_a_kl_weight_everything_is_computed(make_settings: MakeSettings) -> None:
    settings = make_settings(objective={"name": "dapo", "kl_coefficient": 0.1})
    found = weigh(STEP, settings)
    assert [len(group.rollouts) for group in found.updates[0]] == [2, 3, 2]
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
    assert weights_of(step, settings) == [pytest.approx([1 / 8] * 2)], "the denominator excludes it"
    assert advantages_of(step, settings) == [pytest.approx([2 / 3, -1 / 3])], "the mean includes it"


def test_a_step_of_nothing_but_masked_rollouts_is_empty(make_settings: MakeSettings) -> None:
    step = [group(rollout(6, 1.0, truncated=True), rollout(6, 0.0, truncated=True))]
    for aggregation in ("token_mean", "sequence_mean", "group_mean", "constant"):
        assert weigh(step, make_settings(objective={"overlong": "mask", "aggregation": aggregation})).updates == ()


def turns(*lengths: int, reward: float, earned: Sequence[float] = ()) -> TrainingRollout:
    """Return a rollout of turns of these lengths, with one environment token between two turns."""
    mask = [drawn for length in lengths for drawn in (*([1] * length), 0)][:-1]
    draws = np.array([(7, 0, length) for length in lengths], np.uint64)
    return replace(rollout(0, reward, mask=mask), draws=draws, turn_rewards=np.array(earned))


def test_with_credit_by_turn_each_token_has_its_turns_advantage(make_settings: MakeSettings) -> None:
    """A turn's return is the episode's reward minus the rewards of the turns before it; a turn without a reward counts
    as 0. The returns of the three rollouts' turns are 1 and 0.75, then 0 and 0, then 0.5.
    """
    step = [group(turns(2, 1, reward=1.0, earned=[0.25]), turns(1, 3, reward=0.0), turns(2, reward=0.5))]
    settings = make_settings(objective={"advantage": "mean"}, training={"credit": "turn"})
    (found,) = weigh(step, settings).updates[0]
    assert [one.advantages.tolist() for one in found.rollouts] == [[0.5, 0.5, 0.375], [-0.5, -0.375, -0.375, -0.375]]
    settings = make_settings(objective={"advantage": "mean"})
    assert advantages_of(step, settings) == [[0.5, -0.5]]


def test_equal_rewards_have_an_advantage_where_turns_have(make_settings: MakeSettings) -> None:
    step = [group(turns(1, 1, reward=1.0, earned=[0.5]), turns(1, 1, reward=1.0))]
    found = weigh(step, make_settings(objective={"advantage": "mean"}, training={"credit": "turn"}))
    assert found.groups_without_advantage == 0
    assert [one.advantages.tolist() for one in found.updates[0][0].rollouts] == [[0, -0.25], [0, 0.25]]
    assert weigh(step, make_settings()).updates == ()


def test_a_penalty_for_length_is_the_last_turns(make_settings: MakeSettings) -> None:
    objective = {"overlong": "penalty", "overlong_buffer_tokens": 4, "advantage": "mean"}
    step = [group(turns(1, 6, reward=1.0, earned=[1.0]), turns(1, 1, reward=1.0, earned=[1.0]))]
    (found,) = weigh(step, make_settings(objective=objective, training={"credit": "turn"})).updates[0]
    assert [set(one.advantages.tolist()) for one in found.rollouts] == [{-0.5}, {0.5}]


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (2, 0.0), (3, -0.25), (4, -0.5), (5, -0.75), (6, -1.0), (9, -1.0)]
)
def test_the_soft_penalty_by_hand(make_settings: MakeSettings, length: int, penalty: float) -> None:
    """The penalty grows linearly from 0 at 2 tokens (sampling.max_tokens of 6, less the buffer of 4) to 1 at 6 tokens.
    The other rollout of the group has reward 0.
    """
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
    assert advantages_of(step, settings) == [[3, -4]], "by the whole group's mean"
    assert weights_of(step, settings) == [[1 / 5] * 2]
    assert weigh(step, settings).rollouts_unselected == 2


def test_a_pair_chosen_several_times_counts_as_often(make_settings: MakeSettings) -> None:
    strong = group(rollout(1, 9.0), rollout(2, -9.0))
    weak = [group(rollout(1, 1e-9), rollout(2, 0.0)) for _ in range(3)]
    objective = {"selection": "shuffle_r1", "shuffle_batches": 4, "aggregation": "token_mean", "advantage": "mean"}
    settings = make_settings(objective=objective)
    (found,) = weigh([strong, *weak], settings).updates[0]
    assert [rollout.weight for rollout in found.rollouts] == [pytest.approx(4 / 12)] * 2, "alone in all four"
    assert weigh([strong, *weak], settings).rollouts_unselected == 6


def test_a_group_mean_counts_a_group_once_despite_repeated_pairs(make_settings: MakeSettings) -> None:
    step = [group(rollout(1, reward), rollout(3, -reward)) for reward in (9.0, 1.0)]
    objective = {"selection": "shuffle_r1", "shuffle_batches": 3, "aggregation": "group_mean", "advantage": "mean"}
    found = weigh(step, make_settings(objective=objective)).updates[0]
    sums = [sum(one.weight * one.loss_mask.sum() for one in of_group.rollouts) for of_group in found]
    assert sums == [pytest.approx(1 / len(found))] * len(found)


def test_a_step_that_is_trained_again_draws_the_same_pairs(make_settings: MakeSettings) -> None:
    step = [group(rollout(1, 1.0), rollout(2, -1.0)) for _ in range(16)]
    objective = {"selection": "shuffle_r1", "shuffle_batches": 4, "advantage": "mean"}
    settings = make_settings(objective=objective, training={"updates_per_step": 2})

    def drawn(version: int) -> list[list[tuple[int, float]]]:
        of_step = weigh(step, settings, learner_version=version)
        return [[(one.number, one.rollouts[0].weight) for one in of_update] for of_update in of_step.updates]

    assert drawn(3) == drawn(3) != drawn(4)


def test_each_update_has_its_own_sub_batches(make_settings: MakeSettings) -> None:
    """Each of several updates per step trains on its own selection of sub-batches. In total each rollout keeps its
    weight, and the updates are equally large.
    """
    step = [group(*(rollout(3, reward) for reward in (2.0, 1.0, -1.0, -2.0, 0.5, -0.5))) for _ in range(8)]
    objective = {"selection": "shuffle_r1", "shuffle_batches": 4, "aggregation": "token_mean", "advantage": "mean"}

    def weights(settings: LearnerSettings) -> list[dict[int, float]]:
        found = weigh(step, settings, learner_version=7).updates
        return [{one.number: one.weight for of in update for one in of.rollouts} for update in found]

    (whole,) = weights(make_settings(objective=objective))
    shares = weights(make_settings(objective=objective, training={"updates_per_step": 2}))
    assert {number: sum(share.get(number, 0) for share in shares) for number in whole} == pytest.approx(whole)
    assert set(shares[0]) != set(shares[1]) and set(shares[0]) & set(shares[1]), "some pairs are in both"
    assert [sum(share.values()) for share in shares] == [pytest.approx(sum(whole.values()) / 2)] * 2
    # 16 pairs of rollouts (6 tokens each) are kept. From these, each update draws 2 sub-batches of 4 pairs, so a
    # pair occurs once or twice in an update.
    assert {round(96 * weight) for share in shares for weight in share.values()} == {1, 2}


def test_pairs_without_advantage_are_spread_over_the_updates(make_settings: MakeSettings) -> None:
    """Without advantages only the KL term is left; each pair must still be computed in exactly one update."""
    step = [group(rollout(1, 1.0), rollout(2, 1.0)) for _ in range(5)]
    objective = {"selection": "shuffle_r1", "shuffle_batches": 4, "kl_coefficient": 0.1}
    found = weigh(step, make_settings(objective=objective, training={"updates_per_step": 2})).updates
    assert sorted(of.number for update in found for of in update) == list(range(5))
    assert [len(update) for update in found] == [3, 2]


def test_truncated_rollouts_are_not_selected(make_settings: MakeSettings) -> None:
    step = [group(rollout(1, 4.0), rollout(2, 2.0), rollout(3, 1.0), rollout(6, -3.0, truncated=True))]
    objective = {"selection": "shuffle_r1", "overlong": "mask", "advantage": "mean"}
    found = weigh(step, make_settings(objective=objective))
    assert advantages_of(step, make_settings(objective=objective)) == [[3]], "1 - mean is 0, so it is not computed"
    assert (found.rollouts_masked, found.rollouts_unselected) == (1, 1)
