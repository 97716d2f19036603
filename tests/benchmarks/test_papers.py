from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks import papers
from benchmarks.harness.progress import Progress
from benchmarks.papers.runs import Found, Wanted
from tests.benchmarks.papers.toy import ran


def test_tables_that_are_wanted_come_with_rows_and_headline(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(tables: Sequence[Wanted], seed: int, done: object) -> None:
        for number, (cases, seeds) in enumerate(tables):
            found: Found = {case: [ran(0.5, 0.9)] * seeds for case in cases}
            done(number, found)  # type: ignore[operator]

    monkeypatch.setattr(papers, "carry_out_all", made_up)
    names = ["Echo: parity", "AReaL*"]
    progress = Progress(papers.plan(), names)
    measured = papers.measure(0, progress)
    assert {row["table"] for row in measured.rows} == {"Echo: parity", "AReaL: decoupled PPO"}
    assert measured.headline["parity_gap"] == 0 and "s11_gap_corrected" not in measured.headline
    assert progress.so_far is not None and len(progress.so_far.rows) == len(measured.rows)


def test_a_run_that_several_tables_name_is_planned_once() -> None:
    names = {table.name for table in papers.TABLES}
    total = sum(planned.seconds for planned in papers.plan() if planned.name in names)
    assert total < sum(case.seconds for table in papers.TABLES for case in table.reports) * papers.SEEDS / 2
