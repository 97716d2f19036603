from __future__ import annotations

from pathlib import Path

import pytest

from echo_hub.sessions.openings import Openings
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import EnvironmentAway

PROBLEM = Problem(prompt="über\n", metadata={"seed": 2**64 - 1, "rows": [1, None]}, prompt_ids=(1, 2))


def test_problems_are_read_again_by_another_process(tmp_path: Path) -> None:
    first = Openings(tmp_path / "run", "a")
    assert first.get(2**64 - 1) is None
    assert first.put(2**64 - 1, PROBLEM) == PROBLEM
    second = Openings(tmp_path / "run", "a")
    assert second.get(2**64 - 1) == PROBLEM
    assert second.put(2**64 - 1, Problem(prompt="late")) == PROBLEM
    assert Openings(tmp_path / "run", "b").get(2**64 - 1) is None
    first.close()
    second.close()


def test_a_drawn_problem_is_on_the_disk_or_drawing_waits(tmp_path: Path) -> None:
    openings = Openings(tmp_path, "a")
    openings.put(1, PROBLEM)
    assert openings._opened().execute("PRAGMA synchronous").fetchone() == (2,), "a power loss costs no problem"
    openings._opened().execute("PRAGMA max_page_count = 2")  # SQLite then says the same as on a full disk.
    long = Problem(prompt="x" * 100_000)
    with pytest.raises(EnvironmentAway, match=r"(?s)cannot be written down.*full.*Free space"):
        openings.put(2, long)
    assert openings.get(1) == PROBLEM
    openings._opened().execute("PRAGMA max_page_count = 1000")
    assert openings.put(2, long) == long
    openings.close()


def test_without_a_run_problems_stay_in_memory() -> None:
    openings = Openings(None, "a")
    openings.put(1, PROBLEM)
    assert openings.get(1) == PROBLEM
