"""The case without a Ray cluster; the one with a cluster takes a minute and is left out."""

from __future__ import annotations

import pytest

from benchmarks import scorers
from benchmarks.harness.progress import Progress


def test_rates_and_processor_time_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorers, "CALLS", 512)
    monkeypatch.setattr(scorers, "ROUNDS", 2)
    measured = scorers.measure(0, Progress(scorers.plan(), ["local"]))
    (row,) = measured.rows
    assert 0 < row["least_per_s"] <= row["scored_per_s"] <= row["most_per_s"]
    assert row["processor_us"] > 0
    assert measured.headline == {f"local: {name}": row[name] for name in ("scored_per_s", "processor_us")}
