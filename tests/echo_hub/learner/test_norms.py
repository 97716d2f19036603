from __future__ import annotations

from math import exp, inf, log

import numpy as np
import pytest

from echo_hub.learner.norms import WARM_UP, WINDOW, limit


def test_without_a_history_there_is_no_limit() -> None:
    assert limit([1.0] * (WARM_UP - 1)) == inf
    assert limit([1.0] * WARM_UP) == pytest.approx(10)


def test_the_limit_by_hand() -> None:
    """Limit = exp(median + 8 * MAD / 0.6745) over the logarithms of recent norms, or 10 times the median if MAD, the
    median absolute deviation, is too small.
    """
    recent = [exp(-1), exp(1)] * 5
    assert limit(recent) == pytest.approx(exp(8 / 0.6745))
    assert limit([exp(-1), 1.0, 1.0, 1.0, exp(1)] * 2) == pytest.approx(10)


def test_one_outlier_does_not_raise_the_limit_and_a_lasting_change_does() -> None:
    usual = list(np.exp(0.1 * np.random.default_rng(0).standard_normal(WINDOW)))
    assert limit([*usual, 1e6]) == pytest.approx(limit(usual), rel=0.1)
    grown = usual + [1e6] * (WINDOW // 2 + 1)
    assert limit(grown) > 1e6
    assert log(limit([1e-9] * 100 + usual)) == pytest.approx(log(limit(usual))), "only the window counts"
