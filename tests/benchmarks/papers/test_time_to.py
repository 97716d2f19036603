from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from benchmarks.papers.time_to import evaluations, headline_of


def test_time_is_none_for_a_miss_and_trls_miss_counts_its_whole_time() -> None:
    there, never = {"seconds": 40.0, "whole_s": 41.0}, {"seconds": None, "whole_s": 100.0}
    assert headline_of(there, {"seconds": 80.0, "whole_s": 81.0}) == {"time_to_90_over_trl": 0.5}
    assert headline_of(there, never) == {"time_to_90_over_trl": 0.4}
    assert headline_of(never, there) == {"time_to_90_over_trl": None}


def test_evaluations_so_far_in_order(tmp_path: Path) -> None:
    file = tmp_path / "echo.db"
    assert evaluations(file) == []
    with closing(sqlite3.connect(file)) as database, database:
        assert evaluations(file) == [], "no table yet"
        database.execute("CREATE TABLE evaluations (policy_version INTEGER, kind TEXT, accuracy REAL)")
        rows = [(5, "greedy", 0.8), (0, "greedy", 0.4), (5, "sampled", 0.99)]
        database.executemany("INSERT INTO evaluations VALUES (?, ?, ?)", rows)
    assert evaluations(file) == [(0, 0.4), (5, 0.8)]
