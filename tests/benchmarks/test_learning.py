"""With little time, each case is trained with fewer seeds, and the JSON names the missing ones."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from benchmarks import learning
from benchmarks.harness.progress import Progress
from benchmarks.learning import cases

SMALL = {"steps": 2, "groups_per_step": 2, "group_size": 2, "problems": 4}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_each_case_runs_its_first_seed_even_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    small = tuple(replace(case, **SMALL) for case in (cases.COLOCATED, cases.SEQUENTIAL, cases.BY_STALENESS[1]))
    monkeypatch.setattr(cases, "ALL", small)
    monkeypatch.setattr(cases, "COLOCATED", small[0])
    monkeypatch.setattr(cases, "FLEET", ())
    monkeypatch.setattr(learning, "MOST_S", 0.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    lines: list[str] = []
    progress = Progress(learning.plan(), say=lines.append)
    measured = learning.measure(0, progress)
    assert [row["case"] for row in measured.rows] == [case.name for case in small]
    seeds = [row["seeds"] for row in measured.rows]
    assert min(seeds) >= 1 and sum(seeds) + len(progress.left_out) == len(lines) == 9
    assert progress.left_out and not any("seed 1 of" in one.case for one in progress.left_out)
    assert measured.rows[0]["gap"] == 0 and measured.picture is not None
