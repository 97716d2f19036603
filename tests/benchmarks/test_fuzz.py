from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fuzz
from benchmarks.fuzzing.targets import TARGETS

pytest.importorskip("atheris")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "TARGETS", {name: replace(one, runs=20_000) for name, one in TARGETS.items()})


def test_a_finding_is_reported_with_its_bytes(tmp_path: Path) -> None:
    row = fuzz.fuzzed("bencode", tmp_path, 0, child="tests.benchmarks.fuzzing.broken_child")
    assert row["findings"] == 1 and bytes.fromhex(row["first"])
    assert "ZeroDivisionError" in row["said"]
