from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import learning
from benchmarks.harness.progress import Progress
from benchmarks.harness.site import merged
from benchmarks.learning import cases

SMALL = {"training": {"steps": 2, "groups_per_step": 2, "group_size": 2}, "evaluation": {"problems": 4}}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_gaps_are_those_to_the_colocated_run(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = (cases.COLOCATED, cases.SEQUENTIAL)
    small = [replace(case, settings=merged(case.settings, SMALL)) for case in chosen]
    monkeypatch.setattr(cases, "ALL", small)
    monkeypatch.setattr(cases, "COLOCATED", small[0])
    monkeypatch.setattr(cases, "SEQUENTIAL", small[1])
    monkeypatch.setattr(learning, "SEEDS", 1)
    measured = learning.measure(0, Progress(learning.plan(), ["*seed*"]))
    assert [(row["case"], row["seeds"], row["gap"]) for row in measured.rows] == [
        ("colocated", 1, 0),
        ("sequential", 1, 0),
    ]
    assert measured.headline["sequential_gap"] == 0 and measured.headline["fleet_lost_share"] is None
