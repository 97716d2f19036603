"""A case that is left out of the simulation gives no figures."""

from __future__ import annotations

import pytest

from benchmarks import simulate
from benchmarks.harness.progress import Progress
from benchmarks.simulate import cases


def test_headlines_are_none_without_their_cases() -> None:
    assert set(simulate.headline({}).values()) == {None} and len(simulate.headline({})) == 18


def test_cases_without_a_sufficient_pool_are_left_out() -> None:
    lacking = {case.name for case in simulate.plan() if case.lacks}
    assert lacking == {f"grid, sigma {sigma}, S = {bound}, step 1 s" for sigma in ("0.5", "1") for bound in (1, 2)}


def test_a_case_is_measured_in_a_separate_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SIZES", {10: 6})
    measured = simulate.measure(0, Progress(simulate.plan(), ["10 nodes"]))
    assert [row["case"] for row in measured.rows] == ["10 nodes"]
    assert measured.headline["events_per_s_10"] > 1_000
    assert measured.conditions["details"]["10 nodes"]["finished"]
