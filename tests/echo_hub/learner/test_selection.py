from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.learner.selection import most_unlike


@pytest.mark.parametrize(
    ("advantages", "kept"),
    [
        ([0.1, 0.9, -0.8, 0.2, -0.1, 0.3, -0.5, -0.1], [1, 2, 5, 6]),
        ([3.0, 1.0, 2.0, 0.0], [0, 3]),
        ([3.0, 1.0, 2.0, 0.0, 2.5, 0.5], [0, 3, 4, 5]),  # two of three pairs
        ([1.0, 0.0, 0.5], [0, 1]),  # the middle one has no pair
        ([1.0, 0.0], [0, 1]),
        ([0.0], [0]),
        ([0.0, 0.0, 0.0, 0.0], [0, 3]),
    ],
)
def test_by_hand(advantages: list[float], kept: list[int]) -> None:
    assert np.flatnonzero(most_unlike(np.array(advantages))).tolist() == kept


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=33))
def test_it_keeps_half_of_the_pairs_and_the_most_unlike(advantages: list[float]) -> None:
    values = np.array(advantages)
    kept = most_unlike(values)
    pairs = len(values) // 2
    assert kept.sum() == 2 * -(-pairs // 2)
    inside, outside = values[kept], values[~kept]
    half = len(inside) // 2
    low, high = np.sort(inside)[:half], np.sort(inside)[half:]
    if len(outside):
        assert low.max() <= outside.min() and high.min() >= outside.max()
