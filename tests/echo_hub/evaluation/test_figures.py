from __future__ import annotations

import math
from itertools import combinations

import pytest

from echo_hub.evaluation.figures import pass_at, standard_error


@pytest.mark.parametrize(("samples", "solved", "k"), [(5, 2, 1), (5, 2, 3), (5, 0, 5), (5, 5, 2), (6, 3, 4), (8, 1, 8)])
def test_pass_at_k_is_the_share_of_all_subsets(samples: int, solved: int, k: int) -> None:
    subsets = list(combinations([True] * solved + [False] * (samples - solved), k))
    assert pass_at(solved, samples, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_the_standard_error_is_that_of_a_mean_over_problems() -> None:
    assert standard_error([1.0, 0.0, 0.0, 1.0]) == pytest.approx(math.sqrt((4 * 0.25 / 3) / 4))
    assert standard_error([0.5, 0.5]) == 0.0
    assert standard_error([1.0]) == 0.0
