from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from echo_hub.cluster import parcel as parcels
from echo_hub.cluster.parcel import Parcel, base_model, lacking, source_hash, unpack
from echo_shared.errors import ConfigError


def test_files_and_directories_arrive_in_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/else/where")
    work = tmp_path / "here"
    for name in ("data/one.txt", ".git/config", "package/__pycache__/old.pyc", "package/module.py"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(name)
    single = tmp_path / "problems.jsonl"
    single.write_text("{}\n")
    os.utime(single, (0, 0))  # Earlier than the first day that a zip file can store.
    Parcel(contents={"work": work, "files/0/problems.jsonl": single}).write(tmp_path / "parcel.zip")
    there = tmp_path / "there"
    environment = unpack(tmp_path / "parcel.zip", there)
    files = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    assert files == {"work/data/one.txt", "work/package/module.py", "files/0/problems.jsonl"}
    assert environment == {"PYTHONPATH": f"{there}/work:{there}/modules:/else/where"}
    assert all(Path(place).is_dir() for place in environment["PYTHONPATH"].split(":")[:2])


def test_a_parcel_may_be_empty(tmp_path: Path) -> None:
    Parcel().write(tmp_path / "parcel.zip")
    unpack(tmp_path / "parcel.zip", tmp_path)
    assert (tmp_path / "work").is_dir()


def test_files_that_are_too_large_or_unreadable_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large").write_bytes(bytes(100))
    with pytest.raises(ConfigError, match="cannot be read"):
        Parcel(contents={"work": tmp_path / "missing"}).write(tmp_path / "parcel.zip")
    monkeypatch.setattr(parcels, "MOST_BYTES", 99)
    with pytest.raises(ConfigError, match="too large"):
        Parcel(contents={"files/0/large": tmp_path / "large"}).write(tmp_path / "parcel.zip")


def test_a_name_that_climbs_out_stays_inside(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "parcel.zip", "w") as archive:
        archive.writestr("../outside", "")
    unpack(tmp_path / "parcel.zip", tmp_path / "there")
    assert not (tmp_path / "outside").exists()


def test_a_base_model_is_sent_unless_it_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_bytes(bytes(100))
    parcel, place = base_model(base)
    assert ([name for name, _ in parcel.files()], place) == (["base/config.json", "base/model.safetensors"], "../base")
    monkeypatch.setattr(parcels, "MOST_BYTES", 101)
    parcel, place = base_model(base)
    assert (list(parcel.files()), place) == ([], str(base))
    assert lacking(parcel.lies_there) == ""
    (base / "model.safetensors").write_bytes(bytes(99))
    assert lacking(parcel.lies_there) == str(base / "model.safetensors")


def test_the_source_has_one_hash() -> None:
    assert source_hash() == source_hash()
    assert len(source_hash()) == 32
