"""Simulated completion lengths follow from group and index, stay within their bounds, and vary by
prompt as configured.
"""

from __future__ import annotations

from math import log
from statistics import fmean, pvariance

import pytest

from echo_hub.simulator.lengths import LengthModel
from echo_hub.simulator.scenario import SimulatedLengths


def lengths(group_size: int = 8, seed: int = 0, **settings: float) -> LengthModel:
    return LengthModel(SimulatedLengths.model_validate(settings), group_size=group_size, seed=seed)


def test_ratio_1_makes_all_alike() -> None:
    drawn = lengths(tokens=100, ratio=1)
    assert drawn.of_group(0) == drawn.of_group(12_345) == [100] * 8
    assert drawn.mean == pytest.approx(100)


def test_the_longest_has_ratio_times_the_tokens_of_the_shortest() -> None:
    drawn = lengths(tokens=1_000, ratio=30, prompt_share=0.5)
    found = [tokens for group in range(2_000) for tokens in drawn.of_group(group)]
    assert (max(found) / min(found), fmean(found)) == pytest.approx((30, drawn.mean), rel=0.05)


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_a_prompt_has_its_share_of_the_variance(share: float) -> None:
    drawn = lengths(tokens=1e5, ratio=10, prompt_share=share, prompts=100_000)
    groups = [[log(tokens) for tokens in drawn.of_group(group)] for group in range(2_000)]
    whole = pvariance([one for group in groups for one in group])
    within = fmean(pvariance(group) * 8 / 7 for group in groups)
    assert 1 - within / whole == pytest.approx(share, abs=0.05)


def test_a_repeated_prompt_has_its_own_length() -> None:
    drawn = lengths(tokens=1_000, ratio=30, prompt_share=1.0, prompts=10)
    assert drawn.of_group(3) == drawn.of_group(13) != drawn.of_group(4)


def test_lengths_do_not_depend_on_groups_in_between() -> None:
    drawn = lengths(ratio=30)
    first = drawn.of_group(5)
    for block in range(200):
        drawn.of_group(block * 256)
    assert drawn.of_group(5) == first == lengths(ratio=30).of_group(5) != lengths(ratio=30, seed=1).of_group(5)
