"""Limits on the number of simultaneous rollouts, which the node learns and keeps on a real disk."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from echo_node.engine.widths import KEPT_S, EngineMemoryCase, Widths

PLACE = EngineMemoryCase(backend="torch", device="cuda", software="torch 2.13", machine="a GPU 24 GiB", base="abc")
LIMIT = 2**34


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "node" / "widths.json"


def test_a_limit_outlives_the_process(file: Path) -> None:
    assert Widths(file).limit(PLACE, LIMIT) == 0
    Widths(file).remember(PLACE, LIMIT, 64)
    Widths(file).remember(PLACE, LIMIT, 32)
    assert Widths(file).limit(PLACE, LIMIT) == 32


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(EngineMemoryCase)])
def test_a_limit_holds_only_for_its_engine_and_base(file: Path, field: str) -> None:
    Widths(file).remember(PLACE, LIMIT, 32)
    assert Widths(file).limit(PLACE, 2 * LIMIT) == 0
    assert Widths(file).limit(dataclasses.replace(PLACE, **{field: "another"}), LIMIT) == 0
    assert Widths(file).limit(PLACE, LIMIT) == 32


def test_a_limit_expires(file: Path) -> None:
    Widths(file).remember(PLACE, LIMIT, 32)
    entries = json.loads(file.read_text())
    for entry in entries.values():
        entry["learnt_at"] -= KEPT_S
    file.write_text(json.dumps(entries))
    assert Widths(file).limit(PLACE, LIMIT) == 0


def test_limits_can_be_forgotten(file: Path) -> None:
    Widths(file).forget()
    Widths(file).remember(PLACE, LIMIT, 32)
    Widths(file).forget()
    assert Widths(file).limit(PLACE, LIMIT) == 0


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"a": 1}', '{"%s": {"width": "many"}}'])
def test_a_damaged_file_counts_as_empty(file: Path, damage: str) -> None:
    Widths(file).remember(PLACE, LIMIT, 32)
    key = next(iter(json.loads(file.read_text())))
    file.write_text(damage.replace("%s", key))
    assert Widths(file).limit(PLACE, LIMIT) == 0
    Widths(file).remember(PLACE, LIMIT, 16)
    assert Widths(file).limit(PLACE, LIMIT) == 16


def test_a_disk_that_cannot_be_written_is_reported_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "node").touch()
    with caplog.at_level(logging.WARNING):
        Widths(tmp_path / "node" / "widths.json").remember(PLACE, LIMIT, 8)
    assert "cannot be stored" in caplog.text
