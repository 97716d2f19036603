from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_shared.records.rewards import all_equal, of_each_turn, returns


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([], True),
        ([0.5], True),
        ([0.3, 0.1 + 0.2, 0.3], True),
        ([1e12, 1e12 + 1], True),
        ([-1e12, -1e12 - 1], True),
        ([0.0, 1e-6], False),
        ([-1.0, 1.0], False),
    ],
)
def test_rounding_makes_no_difference(rewards: list[float], equal: bool) -> None:
    assert all_equal(rewards) is equal


@given(st.floats(-1e9, 1e9), st.lists(st.integers(1, 9), min_size=2, max_size=8))
def test_sums_with_rounding_errors_count_as_equal(reward: float, parts: list[int]) -> None:
    assert all_equal([sum([reward / part] * part) for part in parts])


@pytest.mark.parametrize(
    ("turn_rewards", "discount", "expected"),
    [
        ([], 0.5, [1.0]),
        ([0.25, -0.5], 1.0, [1.0, 0.75, 1.25]),
        ([0.25, -0.5], 0.5, [0.25 + 0.5 * (-0.5 + 0.5 * 1.25), -0.5 + 0.5 * 1.25, 1.25]),
        ([0.0, 0.0], 0.5, [0.25, 0.5, 1.0]),
    ],
)
def test_returns_are_the_discounted_sums_of_later_rewards(
    turn_rewards: list[float], discount: float, expected: list[float]
) -> None:
    """Here the episode's reward is 1. The last turn gets the part that the other turns' own rewards do not cover."""
    assert returns(1.0, turn_rewards, discount=discount) == pytest.approx(expected)


@given(st.floats(-10, 10), st.lists(st.floats(-10, 10), max_size=9))
def test_undiscounted_the_first_turn_has_all_to_come(reward: float, turn_rewards: list[float]) -> None:
    found = returns(reward, turn_rewards, discount=1.0)
    assert all_equal([found[0], reward]) and len(found) == len(turn_rewards) + 1


def test_turns_are_compared_with_the_same_turns() -> None:
    assert of_each_turn([[1.0, 2.0, 3.0], [4.0], [5.0, 6.0]]) == [[1.0, 4.0, 5.0], [2.0, 6.0], [3.0]]
    assert of_each_turn([]) == []
