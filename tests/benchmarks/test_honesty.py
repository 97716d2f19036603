"""The honesty study, scaled down to a test."""

from __future__ import annotations

import pytest

from benchmarks import honesty
from benchmarks.harness.progress import Progress
from benchmarks.honesty import shopping, short_run

CASES = ("honest, torch f32", "honest, torch f32, weights of 4 bits", honesty.COST)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_exact_engines_show_nothing_and_coarse_ones_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_run, "GROUPS", 16)
    monkeypatch.setattr(honesty, "HONEST_GROUPS", 64)
    monkeypatch.setattr(honesty, "COST_REPEATS", 1)
    measured = honesty.measure(0, Progress(honesty.plan(), CASES))
    rows = {row["case"]: row for row in measured.rows}
    honest = rows["honest, torch f32"]
    assert honest["u 0.001"] == honest["claim 0.01"] == 0 and honest["rollouts"] == 512
    assert rows["honest, torch f32, weights of 4 bits"]["u 0.001"] > 0
    assert rows["honest, torch f32, weights of 4 bits"]["u 1"] < 0.005
    assert {"verified_tokens_per_cpu_s", "cost_of_checking_all"} <= set(measured.headline)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_exact_node_that_says_four_bits_earns_by_neighbours_and_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_run, "GROUPS", 16)
    monkeypatch.setattr(honesty, "SHOPPED_GROUPS", 40)
    monkeypatch.setattr(shopping, "REACHES", (2.0,))
    measured = honesty.measure(0, Progress(honesty.plan(), [*map(shopping.case, ("f32", "q4_0"))]))
    as_exact, _, _, _, as_coarse, with_noise, half, diluted = measured.rows
    gain = {row["case"]: row["reward_shopped"] - row["reward"] for row in measured.rows}
    assert gain[as_coarse["case"]] > gain[as_exact["case"]] + 0.03
    assert as_coarse["to_detection"] < shopping.UNDETECTED and not as_coarse["claims_round"]
    assert with_noise["claims_round"] and with_noise["to_detection"] < shopping.UNDETECTED, "found by its rewards"
    assert diluted["takes"] == shopping.EQUALS and diluted["to_detection"] < shopping.UNDETECTED
    assert as_coarse["reward"] < half["reward_shopped"] < as_coarse["reward_shopped"] == diluted["reward_shopped"]
    assert measured.headline["most_earned_unfound_with_noise"] >= 0
