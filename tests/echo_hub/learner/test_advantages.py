from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.config.objective_defaults import Advantage
from echo_hub.learner.advantages import advantages

KINDS = ("mean", "mean_std", "batch_std", "leave_one_out")
REWARDS = st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=6), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("mean", [-1, 1, 0], [0.5, -0.5]),
        ("mean_std", [-1 / 1.0001, 1 / 1.0001, 0], [0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)]),
        ("leave_one_out", [-1.5, 1.5, 0], [1, -1]),
    ],
)
def test_advantages_by_hand(kind: Advantage, first: list[float], second: list[float]) -> None:
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
    kind: Advantage, reward: float, size: int, others: list[list[float]]
) -> None:
    # The mean of seven rewards of 0.1 is not 0.1 in floating point; the advantage must still be 0.
    found = advantages([np.full(size, reward), *map(np.array, others)], kind)
    assert not found[0].any()
    assert all(np.isfinite(values).all() for values in found)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_no_advantage(kind: Advantage) -> None:
    assert not advantages([np.array([0.1 + 0.2, 0.3, 0.3, 0.3])], kind)[0].any()


@pytest.mark.parametrize("kind", KINDS)
@given(rewards=REWARDS, shift=st.floats(-10, 10))
def test_advantages_add_up_to_nothing_and_do_not_know_the_level(
    kind: Advantage, rewards: list[list[float]], shift: float
) -> None:
    arrays = [np.round(np.array(values), 3) for values in rewards]
    assert all(abs(values.sum()) < 1e-8 for values in advantages(arrays, kind))
    if kind != "batch_std":  # With batch_std, a group's mean reward changes the common deviation.
        moved = advantages([values + round(shift, 3) for values in arrays], kind)
        for before, after in zip(advantages(arrays, kind), moved, strict=True):
            np.testing.assert_allclose(before, after, atol=1e-6)
