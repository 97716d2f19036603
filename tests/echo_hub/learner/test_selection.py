from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.learner.selection import most_unlike, shuffled, times_trained


@pytest.mark.parametrize(
    ("advantages", "kept"),
    [
        ([0.1, 0.9, -0.8, 0.2, -0.1, 0.3, -0.5, -0.1], [1, 2, 5, 6]),
        ([3.0, 1.0, 2.0, 0.0], [0, 3]),
        # Two of three pairs (largest with smallest advantage) are kept.
        ([3.0, 1.0, 2.0, 0.0, 2.5, 0.5], [0, 3, 4, 5]),
        ([1.0, 0.0, 0.5], [0, 1]),  # The middle rollout has no partner.
        ([1.0, 0.0], [0, 1]),
        ([0.0], [0]),
        ([0.0, 0.0, 0.0, 0.0], [0, 3]),
    ],
)
def test_by_hand(advantages: list[float], kept: list[int]) -> None:
    assert np.unique(most_unlike(np.array(advantages))).tolist() == kept


def test_the_largest_goes_with_the_smallest() -> None:
    assert most_unlike(np.array([0.1, 0.9, -0.8, 0.2, -0.1, 0.3, -0.5, -0.1])).tolist() == [[1, 2], [5, 6]]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=33))
def test_selection_keeps_the_half_of_pairs_that_differ_most(advantages: list[float]) -> None:
    values = np.array(advantages)
    kept = np.zeros(len(values), bool)
    kept[most_unlike(values)] = True
    pairs = len(values) // 2
    assert kept.sum() == 2 * -(-pairs // 2)
    inside, outside = values[kept], values[~kept]
    half = len(inside) // 2
    low, high = np.sort(inside)[:half], np.sort(inside)[half:]
    if len(outside):
        assert low.max() <= outside.min() and high.min() >= outside.max()


@given(st.lists(st.floats(0, 3), min_size=1, max_size=40), st.integers(1, 12), st.integers(0, 99))
def test_a_pair_is_once_in_a_sub_batch_and_never_without_advantage(
    strengths: list[float], sub_batches: int, seed: int
) -> None:
    values = np.array(strengths)
    times = shuffled(values, sub_batches, np.random.default_rng(seed))
    assert times.shape == (sub_batches, len(values)) and set(times.flat) <= {0, 1}
    assert (times == shuffled(values, sub_batches, np.random.default_rng(seed))).all()
    if not values.any():
        assert (times.sum(axis=0) == 1).all() and np.ptp(times.sum(axis=1)) <= 1, "dealt out"
        return
    assert not times[:, values == 0].any()
    assert (times.sum(axis=1) == min(-(-len(values) // sub_batches), np.count_nonzero(values / values.sum()))).all()


def test_a_pair_twice_as_strong_is_chosen_about_twice_as_often() -> None:
    values = np.array([1.0, 2.0] * 200)
    times = np.concatenate([shuffled(values, 40, np.random.default_rng(seed)) for seed in range(50)])
    assert times[:, 1::2].sum() / times[:, ::2].sum() == pytest.approx(2, rel=0.05)


def test_both_of_a_pair_count_as_often_and_nothing_is_taken_that_may_not_be() -> None:
    advantages = [np.array([1.0, -1.0, 0.5, -0.5]), np.zeros(4), np.array([2.0, -2.0, 9.0])]
    there = [np.ones(4, bool), np.ones(4, bool), np.array([True, True, False])]
    (once,) = times_trained(advantages, there, sub_batches=0, rng=np.random.default_rng(0))
    assert [of.tolist() for of in once] == [[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0]]
    often = times_trained(advantages, there, sub_batches=6, rng=np.random.default_rng(0))
    assert len(often) == 6
    for first, second, third in often:
        assert first[0] == first[1] and third[0] == third[1] and not second.any() and not third[2]
        assert first[0] + third[0] == 1
