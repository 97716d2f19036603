from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from echo_hub.tasks.base import Problem
from echo_hub.tasks.registry import make_task
from echo_hub.tasks.rewards import MAX_REWARD, RewardBounds
from echo_shared.errors import ConfigError, ScorerError


class Own:
    name = "own"

    def __init__(self, reward_bounds: Any) -> None:
        self.reward_bounds = reward_bounds

    def sample(self, seed: int) -> Problem:
        return Problem(prompt=str(seed))

    def score(self, problem: Problem, completion: str) -> float:
        return 1.0


@pytest.mark.parametrize("name", ["arithmetic", "environment:guess", "reasoning-gym:sokoban"])
def test_a_task_that_declares_none_has_rewards_from_0_to_1(name: str) -> None:
    assert RewardBounds.of(make_task(name, {})) == RewardBounds(lowest=0.0, highest=1.0)


def test_a_task_may_declare_its_own_bounds() -> None:
    assert RewardBounds.of(Own((-1, 0.5))) == RewardBounds(lowest=-1.0, highest=0.5)
    assert RewardBounds.of(Own((-MAX_REWARD, MAX_REWARD))).hold(-MAX_REWARD)


@pytest.mark.parametrize(
    "bounds",
    [None, (), (0.0,), (1.0, 0.0), (1.0, 1.0), (0.0, float("inf")), (float("nan"), 1.0), (0, 1e30), ("0", "1"), "01"],
)
def test_invalid_bounds_are_refused_with_the_valid_form(bounds: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)reward_bounds = .* of own.*\(0\.0, 1\.0\)"):
        RewardBounds.of(Own(bounds))


@pytest.mark.parametrize(
    ("given", "reward"),
    [
        (0, 0.0),
        (1, 1.0),
        (True, 1.0),
        (False, 0.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
        (1.0 + 1e-9, 1.0),
        (-1e-9, 0.0),
    ],
)
def test_a_reward_is_any_number_within_the_bounds(given: Any, reward: float) -> None:
    read = RewardBounds().read(given)
    assert type(read) is float and read == reward


@pytest.mark.parametrize(
    "given",
    [float("nan"), float("inf"), float("-inf"), 1e30, 1.01, -0.01, 2, "1", b"1", None, 1j, [1.0], (), {}, "x" * 10**6],
)
def test_other_results_are_the_scorers_failure(given: Any) -> None:
    with pytest.raises(ScorerError, match=r"The reward is .*numbers from 0 to 1") as caught:
        RewardBounds().read(given)
    assert len(str(caught.value)) < 200


def test_solved_is_the_highest_reward_but_for_rounding() -> None:
    wide = RewardBounds(lowest=-10.0, highest=10.0)
    assert [wide.is_solved(reward) for reward in (10.0, 10.0 - 1e-9, 9.99, 1.0)] == [True, True, False, False]
    assert [RewardBounds().is_solved(reward) for reward in (1.0, 1.0 - 1e-9, 0.99, 0.0)] == [True, True, False, False]
