"""The whole measurement, with shorter runs."""

from __future__ import annotations

import pytest

from benchmarks.dissemination import delta
from benchmarks.harness.progress import Progress


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_rows_of_all_runs_and_the_same_sizes_from_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "STEPS", 5)
    monkeypatch.setattr(delta, "AHEAD", (1, 4))
    monkeypatch.setattr(delta, "LEARNING_RATES", (1e-4,))
    monkeypatch.setitem(delta.MID, "hidden_size", 128)
    lines: list[str] = []
    rows = delta.measure(seed=1, progress=Progress(delta.plan(), say=lines.append))
    cases = [(row["model"], row["lr"], row["dtype"], row["ahead"]) for row in rows]
    assert cases == [
        (model, 1e-4, dtype, ahead)
        for model in ("tiny", "mid")
        for dtype in ("float32", "bfloat16")
        for ahead in (1, 4)
    ]
    assert all(row["exact"] for row in rows)
    assert all(0 < row["delta_ratio"] < row["keyframe_ratio"] < 1 for row in rows)
    assert len(lines) == 2 and "delta, mid, learning rate 0.0001: float32 delta_ratio 0." in lines[1]
    again = delta.measure(seed=1, progress=Progress(delta.plan(), ["*mid*"]))
    assert [row["delta_ratio"] for row in again] == [row["delta_ratio"] for row in rows if row["model"] == "mid"]
