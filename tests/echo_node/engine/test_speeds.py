from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.backends.base import EngineSettings
from echo_node.engine import speeds as module
from echo_node.engine.speeds import SpeedBook, Speeds
from echo_node.engine.widths import EngineMemoryCase
from echo_node.host import hardware

PLACE = EngineMemoryCase(backend="torch", device="cpu", software="torch 1", machine="a machine", base="abc")
SETTINGS = EngineSettings(threads=1)


def measured(rates: dict[int, float], prefill: float = 100.0) -> Speeds:
    rows = [("prefill", 1, prefill), *(("decode", width, rate) for width, rate in rates.items())]
    return Speeds.now(
        [
            {"kind": kind, "width": width, "tokens": 10, "seconds": 10 / rate, "tokens_per_s": rate}
            for kind, width, rate in rows
        ]
    )


@pytest.mark.parametrize(
    ("rates", "width", "best"),
    [
        ({}, 0, 0.0),
        ({1: 5.0, 8: 40.0, 32: 90.0, 64: 100.0}, 32, 100.0),
        ({1: 5.0, 8: 40.0, 32: 89.0, 64: 100.0}, 64, 100.0),
        ({1: 5.0, 8: 40.0, 32: 30.0}, 8, 40.0),
        ({1: 5.0, 8: 40.0}, 0, 40.0),
        ({1: 5.0}, 0, 5.0),
    ],
)
def test_the_least_width_that_is_nearly_the_best(rates: dict[int, float], width: int, best: float) -> None:
    speeds = measured(rates)
    assert (speeds.width, speeds.best, speeds.prefill, speeds.decode) == (width, best, 100.0, rates)


def test_the_rate_at_a_width_is_that_of_the_next_narrower_one() -> None:
    speeds = measured({1: 5.0, 8: 40.0, 32: 30.0})
    assert [speeds.rate(width) for width in (0, 1, 7, 8, 31, 32, 500)] == [0.0, 5.0, 5.0, 40.0, 40.0, 30.0, 30.0]
    assert str(speeds) == "Tokens per second: 5 at width 1, 40 at width 8, 30 at width 32; prompts 100."
    assert "too slow" in str(Speeds.now(()))


def test_a_stored_speed_is_found_only_for_the_same_machine_and_base(tmp_path: Path) -> None:
    book = SpeedBook(tmp_path / "speeds.json")
    assert book.find(PLACE, SETTINGS) is None
    speeds = measured({1: 5.0})
    book.remember(PLACE, SETTINGS, speeds)
    assert book.find(PLACE, SETTINGS) == speeds
    assert book.find(PLACE, replace(SETTINGS, width=7)) == speeds
    for field in ("backend", "device", "software", "machine", "base"):
        assert book.find(replace(PLACE, **{field: "another"}), SETTINGS) is None
    for changed in ({"threads": 2}, {"precision": "f16"}, {"kv_cache_bytes": 1}, {"helpers": ("a:1#code",)}):
        assert book.find(PLACE, replace(SETTINGS, **changed)) is None


def test_codes_of_helpers_are_not_written_down(tmp_path: Path) -> None:
    book = SpeedBook(tmp_path / "speeds.json")
    settings = replace(SETTINGS, helpers=("10.0.0.2:50052#secret",))
    book.remember(PLACE, settings, measured({1: 5.0}))
    text = (tmp_path / "speeds.json").read_text()
    assert "10.0.0.2:50052" in text and "secret" not in text
    assert book.find(PLACE, replace(settings, helpers=("10.0.0.2:50052#changed",))) is not None


def test_cores_that_a_container_takes_away_are_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book, settings = SpeedBook(tmp_path / "speeds.json"), EngineSettings()
    monkeypatch.setattr(hardware, "sensible_threads", lambda: 8)
    book.remember(PLACE, settings, measured({1: 5.0}))
    assert book.find(PLACE, settings) is not None
    monkeypatch.setattr(hardware, "sensible_threads", lambda: 2)
    assert book.find(PLACE, settings) is None


def test_the_oldest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ENTRIES", 2)
    book = SpeedBook(tmp_path / "speeds.json")
    places = [replace(PLACE, base=str(number)) for number in range(3)]
    for number, place in enumerate(places):
        book.remember(place, SETTINGS, Speeds(rows=(), measured_at=float(number)))
    assert [book.find(place, SETTINGS) is None for place in places] == [True, False, False]


@given(st.one_of(st.binary(max_size=60), st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists)))
def test_a_damaged_file_is_ignored_and_replaced(tmp_path_factory: pytest.TempPathFactory, content: object) -> None:
    file = tmp_path_factory.mktemp("book") / "speeds.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    book = SpeedBook(file)
    assert book.find(PLACE, SETTINGS) is None
    book.remember(PLACE, SETTINGS, measured({1: 5.0}))
    assert book.find(PLACE, SETTINGS) is not None


def test_damage_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "speeds.json").write_text('{"x": {"rows": [{"kind": "decode"}], "measured_at": 1}}')
    assert SpeedBook(tmp_path / "speeds.json").find(PLACE, SETTINGS) is None
    assert "is damaged" in caplog.text


def test_a_disk_that_cannot_be_written_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    book = SpeedBook(tmp_path / "file" / "speeds.json")
    book.remember(PLACE, SETTINGS, measured({1: 5.0}))
    assert "cannot be stored" in caplog.text
    assert book.find(PLACE, SETTINGS) is None


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    SpeedBook(tmp_path / "speeds.json").remember(PLACE, SETTINGS, measured({1: 5.0}))
    assert (tmp_path / "speeds.json").stat().st_mode & 0o077 == 0
