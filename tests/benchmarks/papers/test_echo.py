from __future__ import annotations

import pytest

from benchmarks.papers import echo
from benchmarks.papers.cases import ASYNC, COLOCATED, SEQUENTIAL
from benchmarks.papers.small import LARGE
from tests.benchmarks.papers.toy import ran


def test_the_parity_gap_is_to_the_worse_of_both() -> None:
    found = {COLOCATED: [ran(0.5, 0.9)], SEQUENTIAL: [ran(0.5, 0.9)], ASYNC: [ran(0.5, 0.8)]}
    assert echo.PARITY.headline(found)["parity_gap"] == pytest.approx(0.1)


def test_curves_are_as_far_apart_as_at_their_worst_point() -> None:
    found = {
        COLOCATED: [ran(0.5, 0.6, 0.9), ran(0.5, 0.8, 0.9)],
        echo.TRL: [ran(0.5, 0.6, 0.8), ran(0.5, 0.6, 1.0)],
        echo.TRL_SAME_DRAWS: [ran(0.5, 0.6, 0.9), ran(0.5, 0.8, 0.8)],
    }
    gaps = {"trl_curve_gap": pytest.approx(0.05), "trl_own_draws_gap": pytest.approx(0.1)}
    assert echo.TRL_CURVE.headline(found) == gaps


def test_the_trained_small_model_is_ahead_by_the_difference_at_the_end() -> None:
    found = {echo.TRAINED: [ran(0.5, 0.9), ran(0.5, 0.8)], LARGE: [ran(0.8), ran(0.7)]}
    assert echo.SMALL_AND_LARGE.headline(found)["small_beats_4x_by"] == pytest.approx(0.1)
