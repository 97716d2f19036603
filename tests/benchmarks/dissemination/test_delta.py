"""The whole delta measurement, with shorter training runs."""

from __future__ import annotations

import pytest

from benchmarks.dissemination import delta
from benchmarks.harness.progress import Progress


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_delta_is_smaller_and_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "STEPS", 4)
    rows = delta.measure(seed=1, progress=Progress(delta.plan(), ["*0.0001"]))
    assert [(row["lr"], row["dtype"]) for row in rows] == [(1e-4, "float32"), (1e-4, "bfloat16")]
    assert all(row["exact"] and 0 < row["delta_ratio"] < 1 for row in rows)
    assert rows[1]["delta_ratio"] < rows[0]["delta_ratio"]
