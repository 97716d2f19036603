from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_shared.rewards import all_equal


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
def test_one_number_by_several_ways_is_equal(reward: float, parts: list[int]) -> None:
    assert all_equal([sum([reward / part] * part) for part in parts])
