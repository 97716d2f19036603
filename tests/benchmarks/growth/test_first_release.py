from __future__ import annotations

from pathlib import Path

from benchmarks.growth.first_release import measure_migration


def test_nothing_of_the_first_releases_books_is_lost(tmp_path: Path) -> None:
    found = measure_migration(tmp_path / "echo.db", rollouts=1_100, seed=0)
    assert found["migrated"] and found["migrate_s"] > 0
