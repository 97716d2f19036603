from __future__ import annotations

import pytest

from benchmarks.papers import staleness
from benchmarks.papers.cases import COLOCATED
from tests.benchmarks.papers.toy import ran


def test_the_best_correction_counts() -> None:
    found = {case: [ran(0.5, 0.7)] for case in staleness.ECHO_2.cases}
    found |= {COLOCATED: [ran(0.5, 0.9)], staleness.AIPO_11: [ran(0.5, 0.85)]}
    assert staleness.ECHO_2.headline(found)["s11_gap_corrected"] == pytest.approx(0.05)


def test_naive_and_decoupled_differ_in_nothing_but_the_ratio() -> None:
    for eta in staleness.ETAS:
        configs = [cases[eta].config(0) for cases in (staleness.DECOUPLED, staleness.RECOMPUTED, staleness.BEHAVIOR)]
        assert len({config.training.model_dump_json() for config in configs}) == 1
        assert len({config.objective.chosen_advantage for config in configs}) == 1
        assert len({config.objective.chosen_aggregation for config in configs}) == 1
