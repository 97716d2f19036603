"""The chaos benchmark's headline covers all its rounds. A real run with some seconds of kills, disconnects and hangs
continues and loses nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import chaos
from benchmarks.chaos import End
from benchmarks.chaos.scene import Books

BOOKS = Books(acknowledged=5, lost_after_ack=0, trained_twice=0, identity_holds=True, quarantined=0)


def test_the_headline_is_of_all_rounds() -> None:
    rows = [
        {"recovered_s": 2.0, "blows": "node killed, hub killed, database restarted, hub killed", "hub_starts": 3},
        {"recovered_s": None, "blows": "memory short", "hub_starts": 1},
    ]
    lost = Books(acknowledged=7, lost_after_ack=1, trained_twice=2, identity_holds=False, quarantined=0)
    ends = [
        End(rounds=[], kills=3, books=BOOKS, evaluated=(10, 0.9)),
        End(rounds=[], kills=4, books=lost, evaluated=None),
    ]
    assert chaos.headline(ends, rows, 0.95, ends[0]) == {
        "lost_after_ack": 1,
        "trained_twice": 2,
        "identity_holds": False,
        "recovered": 0.5,
        "recovered_s_worst": float("inf"),
        "hub_ended_unasked": 1,
        "reward_gap": pytest.approx(0.05),
        "kills": 7,
        "acknowledged": 12,
        "quarantined": 0,
    }
    assert chaos.headline([], [], None, None)["reward_gap"] is None


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_run_continues_and_loses_nothing(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    end = await chaos.disturbed_run(tmp_path, seed=7, seconds=20.0, on_postgresql=False)
    assert end.rounds and all(row["recovered_s"] is not None for row in end.rounds)
    assert end.books.acknowledged > 0
    assert (end.books.lost_after_ack, end.books.trained_twice, end.books.identity_holds) == (0, 0, True)
