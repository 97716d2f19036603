"""Real fuzzing with a few inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fuzz
from benchmarks.fuzzing.targets import CHEAP_RUNS, DEAR_RUNS, TARGETS

pytest.importorskip("atheris")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "TARGETS", {name: replace(one, runs=20_000) for name, one in TARGETS.items()})


def test_a_target_is_run_as_often_as_was_asked_for(tmp_path: Path) -> None:
    row = fuzz.fuzzed("frames from nodes", tmp_path, 0)
    assert row["findings"] == 0, row["said"]
    assert row["runs"] >= 20_000 and row["covered"] > 0


def test_a_finding_is_reported_with_its_bytes(tmp_path: Path) -> None:
    row = fuzz.fuzzed("bencode", tmp_path, 0, child="tests.benchmarks.fuzzing.broken_child")
    assert row["findings"] == 1 and bytes.fromhex(row["first"])
    assert "ZeroDivisionError" in row["said"]


def test_the_headline_sums_up() -> None:
    rows = {"bencode": {"runs": CHEAP_RUNS, "findings": 0}, "deltas": {"runs": DEAR_RUNS, "findings": 2}}
    assert fuzz.headline(rows)["executions"] == CHEAP_RUNS + DEAR_RUNS
    assert fuzz.headline(rows)["findings"] == 2
