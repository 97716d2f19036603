"""Finish and interrupt, with equal seeds, where the pool is not enough."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulate import interrupting
from benchmarks.simulate.cases import margin_of
from benchmarks.simulate.interrupting import CASES, InterruptCase, headline


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_ways_differ_in_nothing_else(case: InterruptCase) -> None:
    finish, interrupt = case.scenario(1, "finish"), case.scenario(1, "interrupt")
    assert margin_of(finish) == margin_of(interrupt) == pytest.approx(interrupting.MARGIN, rel=1e-3)
    training = interrupt.training.model_copy(update={"on_new_version": "finish"})
    assert interrupt.model_copy(update={"training": training}) == finish


def test_interrupted_tokens_are_younger_and_no_rollout_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupting, "STEPS", 12)
    monkeypatch.setattr(interrupting, "WARM_UP_STEPS", 3)
    monkeypatch.setattr(interrupting, "SEEDS", 1)
    row = InterruptCase(max_staleness=4).row(0)
    assert row["interrupt_speed_up"] == pytest.approx(row["s_per_step_finish"] / row["s_per_step"])
    assert row["token_staleness"] < row["token_staleness_finish"] and row["mixed_share"] > 0
    assert row["staleness"] <= 4 and set(row["details"]) == {"finish", "interrupt"}


def test_headlines_are_the_worst_and_the_best() -> None:
    rows: dict[str, dict[str, Any]] = {
        case.name: {"interrupt_speed_up": gain, "token_staleness": age, "token_staleness_finish": 2.0}
        for case, gain, age in zip(CASES, (0.9, 1.1, 1.0), (1.0, 1.9, 0.5), strict=True)
    }
    assert headline(rows) == {
        "interrupt_speed_up": 0.9,
        "interrupt_speed_up_most": 1.1,
        "interrupt_token_staleness": 0.95,
    }
    assert set(headline({}).values()) == {None}
