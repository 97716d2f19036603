from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from echo_hub.config.objective_defaults import Advantage
from echo_hub.config.training_sections import TrainingConfig
from echo_hub.learner.advantages import advantages
from echo_hub.learner.credit import EpisodeRewards, turn_advantages

BY_TURN = TrainingConfig(credit="turn")
GROUP = [
    EpisodeRewards(reward=1.0, turn_rewards=(0.25, -0.5)),
    EpisodeRewards(reward=0.0, turn_rewards=(0.25,)),
    EpisodeRewards(reward=0.5),
]


def found(
    groups: Sequence[Sequence[EpisodeRewards]], training: TrainingConfig, kind: Advantage = "mean"
) -> list[list[list[float]]]:
    values = turn_advantages(groups, training, kind)
    return [[of_episode.tolist() for of_episode in of_group] for of_group in values]


def test_an_episodes_advantage_applies_to_each_turn() -> None:
    assert found([GROUP, [EpisodeRewards(reward=2.0), EpisodeRewards(reward=0.0)]], TrainingConfig()) == [
        [[0.5, 0.5, 0.5], [-0.5, -0.5], [0.0]],
        [[1.0], [-1.0]],
    ]


def test_a_turns_advantage_equals_its_hand_computed_return() -> None:
    """Returns of turns are the episode's reward minus the rewards of earlier turns: 1, 0.75, 1.25; 0, -0.25; 0.5. The
    advantage is the return minus the mean return of the same turn in the group; only one episode has a third turn.
    """
    assert found([GROUP], BY_TURN) == [[[0.5, 0.5, 0.0], [-0.5, -0.5], [0.0]]]
    assert found([GROUP], BY_TURN, "leave_one_out") == [[[0.75, 1.0, 0.0], [-0.75, -1.0], [0.0]]]


def test_later_rewards_are_discounted() -> None:
    """With discount 0.5, returns are 0.3125, 0.125, 1.25; 0.125, -0.25; 0.5. The means are 0.3125 (first turns) and
    -0.0625 (second turns).
    """
    assert found([GROUP], TrainingConfig(credit="turn", discount=0.5)) == [
        [[0.0, 0.1875, 0.0], [-0.1875, -0.1875], [0.1875]]
    ]


def test_an_early_end_does_not_lower_longer_episodes() -> None:
    """Two of four episodes are solved in their first turn and have no second one, so second turns are compared only
    with each other.
    """
    group = [EpisodeRewards(reward=1.0)] * 2 + [EpisodeRewards(reward=r, turn_rewards=(0.0,)) for r in (1.0, 0.0)]
    assert found([group], TrainingConfig())[0][2] == [0.25, 0.25]
    assert found([group], BY_TURN)[0][2] == [0.25, 0.5]


def test_a_groups_turns_share_one_deviation() -> None:
    """Returns deviate from the mean of the same turn by 0.5, 0.5, 0 (first turns), 0.5, 0.5 (second) and 0 (third). Six
    returns less three means leave three degrees of freedom.
    """
    std = (4 * 0.25 / 3) ** 0.5 + 1e-4
    assert found([GROUP], BY_TURN, "mean_std")[0] == [
        pytest.approx([0.5 / std, 0.5 / std, 0.0]),
        pytest.approx([-0.5 / std, -0.5 / std]),
        [0.0],
    ]


def test_a_steps_turns_share_the_deviation_of_all_returns() -> None:
    std = np.std([1, 0.75, 1.25, 0, -0.25, 0.5, 7], ddof=1) + 1e-4
    values = found([GROUP, [EpisodeRewards(reward=7.0)]], BY_TURN, "batch_std")
    assert values[0][0] == pytest.approx([0.5 / std, 0.5 / std, 0.0]) and values[1] == [[0.0]]


def test_groups_are_compared_with_none_but_themselves() -> None:
    shifted = [EpisodeRewards(reward=one.reward + 7, turn_rewards=one.turn_rewards) for one in GROUP]
    assert found([GROUP, shifted], BY_TURN)[0] == found([shifted, GROUP], BY_TURN)[0]


@pytest.mark.parametrize("training", [BY_TURN, TrainingConfig(), TrainingConfig(credit="turn", discount=0.9)])
@pytest.mark.parametrize("kind", ["mean", "mean_std", "batch_std", "leave_one_out"])
def test_for_one_turn_all_credits_are_equal(training: TrainingConfig, kind: Advantage) -> None:
    groups = [[EpisodeRewards(reward=r) for r in rewards] for rewards in ((0.0, 2.0, 1.0), (5.0, 5.0))]
    expected = advantages([np.array([0.0, 2.0, 1.0]), np.array([5.0, 5.0])], kind)
    assert found(groups, training, kind) == [[[value] for value in values.tolist()] for values in expected]


def test_without_a_discount_the_gradient_has_the_direction_of_the_episodes_reward() -> None:
    """Credit by turn must change only the variance of the gradient, not its direction. In a game of two turns of one
    bit each, averaged over all pairs of episodes, the gradient must equal that of the episode's reward, whatever
    rewards single turns have.
    """
    bits = [(a, b) for a in (0, 1) for b in (0, 1)]

    def reward(a: int, b: int) -> float:
        return float(a + 2 * b + 4 * a * b)

    def gradient(training: TrainingConfig, earned: Sequence[float]) -> list[float]:
        sums = np.zeros(2)
        for one in bits:
            for other in bits:
                pair = [EpisodeRewards(reward=reward(*each), turn_rewards=(earned[each[0]],)) for each in (one, other)]
                values = turn_advantages([pair], training, "leave_one_out")[0]
                sums += [(each - 0.5) * values[0][turn] for turn, each in enumerate(one)]
        return (sums / len(bits) ** 2).tolist()

    expected = gradient(TrainingConfig(), (0.0, 0.0))
    assert expected == pytest.approx([0.75, 1.0])
    for earned in ((0.0, 0.0), (3.0, -1.0)):
        assert gradient(BY_TURN, earned) == pytest.approx(expected)
