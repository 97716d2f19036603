"""Each workload is large enough to fill every batch width; headline figures are taken from the measured rows."""

from __future__ import annotations

import pytest

from benchmarks.backends.speed import MID, TINY, WIDTHS, headline


@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_has_more_work_than_it_holds_at_once(width: int) -> None:
    for subject in (TINY, MID):
        groups = subject.workload(width, 0)
        assert sum(len(group.indices) for group in groups) > width
        assert len({group.lease_id for group in groups}) == len(groups)


def test_the_worst_ratio_counts_and_a_missing_one_is_none() -> None:
    rows = [
        {"model": "mid", "backend": backend, "precision": precision, "width": width, **figures}
        for backend, precision, width, figures in (
            ("llama_cpp", "q8_0", 8, {"tokens_per_s": 60.0, "over_ceiling": 0.9}),
            ("torch", "bf16", 8, {"tokens_per_s": 30.0, "over_ceiling": 2.0}),
            ("llama_cpp", "q8_0", 32, {"tokens_per_s": 60.0, "over_ceiling": 0.9}),
            ("torch", "bf16", 32, {"tokens_per_s": 60.0, "over_ceiling": 3.0}),
        )
    ]
    found = headline(rows)
    assert (found["llama_cpp_q8_0_over_torch_bf16"], found["torch_over_generate_32"]) == (1.0, 3.0)
    assert found["llama_cpp_over_ceiling_32"] is None
