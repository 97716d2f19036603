"""A case's row."""

from __future__ import annotations

import pytest

from benchmarks.simulate import cases
from benchmarks.simulate.cases import SizeCase


def test_a_row_has_the_table_s_figures_and_all_others_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SIZES", {10: 6})
    row = SizeCase(nodes=10).row(0)
    assert row["utilisation"] > 0.5
    assert row["events_per_s"] > 100 and row["bytes_per_node"] > 10 and row["worst_event_ms"] > 0
    details = row["details"]
    assert (details["steps"], details["trained"], details["rollouts_per_step"]) == (6, 240, 40)
