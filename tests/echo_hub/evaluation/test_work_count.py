from __future__ import annotations

import pytest

from echo_hub.evaluation.work_count import WorkCount


def count(done: int, total: int = 512) -> WorkCount:
    begun = WorkCount(doing="Evaluating", units="completions", total=total)
    begun.begin(100.0)
    begun.done = done
    return begun


@pytest.mark.parametrize(
    ("done", "after_s", "text"),
    [
        (0, 30.0, "Evaluating: 0 of 512 completions."),
        (128, 60.0, "Evaluating: 128 of 512 completions, about 3 min left."),
        (256, 30.0, "Evaluating: 256 of 512 completions, about 30 s left."),
        (511, 30.0, "Evaluating: 511 of 512 completions, about 10 s left."),
        (127, 60.0, "Evaluating: 127 of 512 completions."),
        (128, 3_000.0, "Evaluating: 128 of 512 completions, about 2.5 h left."),
        (512, 99.0, "Evaluating: 512 of 512 completions."),
    ],
)
def test_the_rest_is_estimated_from_the_finished_work(done: int, after_s: float, text: str) -> None:
    assert count(done).text(100.0 + after_s) == text


def test_the_rest_of_much_work_is_estimated_after_256_units() -> None:
    assert count(255, 100_000).text(160.0) == "Evaluating: 255 of 100,000 completions."
    assert count(256, 100_000).text(160.0).endswith("about 6.5 h left.")


def test_loading_is_named_and_does_not_count_as_work() -> None:
    loading = WorkCount(doing="Sampling", units="completions")
    assert loading.text(0.0) == "Sampling: loading the task."
    loading.total = 1_000
    assert loading.text(50.0) == "Sampling: loading the model."
    loading.begin(60.0)
    loading.begin(90.0)
    loading.done = 500
    assert loading.text(180.0) == "Sampling: 500 of 1,000 completions, about 2 min left."


def test_resumed_work_is_done_but_says_nothing_about_the_speed() -> None:
    resumed = WorkCount(doing="Training", units="updates", total=90, done=60)
    resumed.begin(0.0)
    assert resumed.text(100.0) == "Training: 60 of 90 updates."
    resumed.done = 70
    assert resumed.text(100.0) == "Training: 70 of 90 updates, about 3 min left."
