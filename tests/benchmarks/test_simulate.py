"""The figures come from the cases' rows, and a case that was left out has none."""

from __future__ import annotations

import pytest

from benchmarks import simulate
from benchmarks.progress import Progress
from benchmarks.simulate import cases

HEADLINES = {
    "utilisation_hetero",
    "stale_share",
    "mean_staleness_over_needed",
    "day_utilisation",
    "day_stale_share",
    "day_tokens_lost_per_failure",
    "speed_up",
    "speed_up_most",
    "interrupt_speed_up",
    "interrupt_speed_up_most",
    "interrupt_token_staleness",
    "false_claims_share",
    "events_per_s_10",
    "events_ratio_100k",
    "worst_event_ms_100k",
    "saving_vs_all_on",
    "cost_over_optimum",
    "utilisation_chosen",
    "utilisation_all_on",
    "bytes_per_node",
    "prediction_error",
    "mean_prediction_error",
}


def test_headlines_are_these_and_none_without_their_cases() -> None:
    assert simulate.headline({}) == dict.fromkeys(HEADLINES)


def test_headlines_are_of_the_worst_case() -> None:
    rows = {
        case.name: {"utilisation": 0.9 + number / 100, "stale_share": number / 10, "over_needed": 1.0 + number}
        for number, case in enumerate(cases.GRID[:3])
    }
    told = simulate.headline(rows)
    assert (told["utilisation_hetero"], told["stale_share"], told["mean_staleness_over_needed"]) == (0.9, 0.2, 3.0)


def test_what_cannot_be_enough_is_left_out() -> None:
    lacking = {case.name for case in simulate.plan() if case.lacks}
    assert lacking == {f"grid, sigma {sigma}, S = {bound}, step 1 s" for sigma in ("0.5", "1") for bound in (1, 2)}


def test_a_case_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SIZES", {10: 6})
    progress = Progress(simulate.plan(), ["10 nodes"])
    measured = simulate.measure(0, progress)
    assert [row["case"] for row in measured.rows] == ["10 nodes"]
    assert measured.headline["events_per_s_10"] > 1_000
    assert measured.conditions["details"]["10 nodes"]["finished"]
