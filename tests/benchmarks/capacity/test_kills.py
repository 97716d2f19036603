"""Counting of tokens lost by a kill; and a real kill, after which the tokens that reached the hub are not resampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.capacity import kills
from benchmarks.capacity.kills import Finished, headline, lost
from benchmarks.harness.progress import Progress

KILLED_AT = 10.0
BEFORE_AND_AFTER = {"first": 1.0, "killed": 4.0, "next": 20.0, "last": 30.0}


@pytest.mark.parametrize(
    ("drawn_by", "expected"),
    [
        ([("killed", 8), ("next", 20)], 0),
        ([("first", 3), ("killed", 5), ("next", 20)], 0),
        ([("first", 8), ("next", 1)], 0),  # The killed node had drawn no token known to the hub.
        ([("killed", 6), ("next", 20)], 2),
        ([("next", 28)], 8),
        ([("next", 9), ("last", 28)], 8),  # Sampled again, and continued after another kill.
        ([("first", 28)], 0),  # It had already begun before the other was killed.
        ([("killed", 30)], 0),
    ],
)
def test_tokens_that_a_later_holder_samples_again_are_lost(drawn_by: list[tuple[str, int]], expected: int) -> None:
    assert lost(8, KILLED_AT, Finished(drawn_by=drawn_by, holders=BEFORE_AND_AFTER)) == expected


def test_the_headline_is_a_kills_mean() -> None:
    assert headline([{"lost": 0}, {"lost": 3}]) == 1.5
    assert headline([]) is None


@pytest.mark.slow
def test_a_kill_costs_nothing_that_the_hub_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp")
    monkeypatch.setattr(kills, "KILLS", 1)
    (row,) = kills.measure(tmp_path, Progress(kills.plan()), seed=1)
    assert row["rollouts_cut"] > 0 and row["hub_had"] >= kills.TOLD
    assert (row["lost"], row["gone_on"]) == (0, row["rollouts_cut"])
