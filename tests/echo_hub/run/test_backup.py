"""Backups of a run with handwritten files and records; tests/end_to_end/test_backup.py backs up a hub in service."""

from __future__ import annotations

import io
import json
import sqlite3
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from echo_hub.run.backup import MANIFEST, SECRET, read_backup, write_backup
from echo_hub.run.directory import RunDirectory
from echo_hub.store.reports import read_newest_step
from echo_hub.store.store import Store
from echo_shared.errors import DISK_FULL, ConfigError, StorageError
from tests.echo_hub.written_steps import train
from tests.small_disk import SmallDisk, needs_mounts


def make_run(root: Path, *, steps: int = 4, checkpoints: tuple[int, ...] = (2, 3, 4, 5)) -> RunDirectory:
    """Make a run whose store is at step `steps`; later steps have only a checkpoint and an adapter."""
    directory = RunDirectory(root)
    root.mkdir()
    for name in ("config.toml", *SECRET, "hub.lock", "logs/learner.log", "artefacts/base/model"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"this is {name}")
    for step in checkpoints:
        for folder in (root / "checkpoints" / f"step-{step:06d}", directory.adapter(step)):
            folder.mkdir(parents=True)
            for name in ("adapter_model.safetensors", "adapter_config.json"):
                (folder / name).write_bytes(f"{name} of {step}".encode() * 1_000)
    store = Store.open(directory.database_url)
    for step in range(1, steps + 1):
        train(store, step)
    store.close()
    return directory


def database(directory: RunDirectory) -> Path:
    return directory.root / "echo.db"


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_backup_holds_exactly_the_files_that_a_run_continues_from(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    made = write_backup(directory, database(directory), tmp_path / "run.backup")
    assert made.trained_step == 4 and made.size_bytes == (tmp_path / "run.backup").stat().st_size
    assert not list(directory.root.glob(".backup-*"))
    found = read_backup(tmp_path / "run.backup", tmp_path / "again")
    assert (found.trained_step, found.made_at) == (4, made.made_at)
    before, after = files(tmp_path / "run"), files(tmp_path / "again")
    assert {name for name in before if name not in after} == {
        "hub.lock",
        "logs/learner.log",
        "artefacts/base/model",
        *(f"{folder}/{name}" for folder in ("checkpoints/step-000005", "adapters/v000005") for name in ADAPTER),
    }, "the database does not have step 5 as trained yet"
    assert {name for name in after if after[name] != before[name]} <= {"echo.db"}
    again = Store.open(RunDirectory(tmp_path / "again").database_url)
    newest = again.read(read_newest_step)
    assert newest is not None and newest.step == 4
    again.close()


ADAPTER = ("adapter_model.safetensors", "adapter_config.json")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such modes")
def test_a_backup_holds_tenants_weights(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    kept = ["tenants/weights/a1/model.json", "tenants/versions/v1073741824/x", "tenants/models/s-1-train-0/after-3/y"]
    for name in (*kept, "tenants/models/s-1-train-0/.unfinished-after-4/z"):
        (directory.root / name).parent.mkdir(parents=True)
        (directory.root / name).write_text(name)
    write_backup(directory, database(directory), tmp_path / "run.backup")
    read_backup(tmp_path / "run.backup", tmp_path / "again")
    found = {name for name in files(tmp_path / "again") if name.startswith("tenants/")}
    assert found == set(kept)


def test_a_backup_and_its_copy_are_readable_only_by_the_owner(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    write_backup(directory, database(directory), tmp_path / "run.backup")
    read_backup(tmp_path / "run.backup", tmp_path / "again")
    assert (tmp_path / "run.backup").stat().st_mode & 0o077 == 0
    assert [path for path in (tmp_path / "again").rglob("*") if path.stat().st_mode & 0o077] == []


def test_the_database_copy_is_consistent(tmp_path: Path) -> None:
    """The hub changes two rows together during the backup. In the copy, they must be equal."""
    directory = make_run(tmp_path / "run")
    stop = threading.Event()

    def write() -> None:
        with sqlite3.connect(database(directory), timeout=60) as own:
            number = 0
            while not stop.is_set():
                number += 1
                for key in ("one", "two"):
                    own.execute("INSERT OR REPLACE INTO run_meta VALUES (?, ?)", (key, str(number)))
                own.commit()
        own.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(5):
            write_backup(directory, database(directory), tmp_path / f"{number}.backup")
            read_backup(tmp_path / f"{number}.backup", tmp_path / str(number))
            copy = sqlite3.connect(tmp_path / str(number) / "echo.db")
            found = [row[0] for row in copy.execute("SELECT value FROM run_meta WHERE key IN ('one', 'two')")]
            copy.close()
            assert len(set(found)) <= 1
    finally:
        stop.set()
        writer.join()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    (tmp_path / "run.backup").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        write_backup(directory, database(directory), tmp_path / "run.backup")
    write_backup(directory, database(directory), tmp_path / "other.backup")
    before = files(tmp_path / "run")
    with pytest.raises(ConfigError, match="new or empty"):
        read_backup(tmp_path / "other.backup", tmp_path / "run")
    assert files(tmp_path / "run") == before and (tmp_path / "run.backup").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    read_backup(tmp_path / "other.backup", tmp_path / "empty")
    assert (tmp_path / "empty" / "echo.db").is_file()


def test_a_checkpoint_that_is_too_old_for_the_database_is_no_backup(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", checkpoints=(1,))
    store = Store.open(directory.database_url)
    store.prune(3)
    store.close()
    with pytest.raises(StorageError, match="too fast"):
        write_backup(directory, database(directory), tmp_path / "run.backup")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize("place", [0.001, 0.3, 0.6, 0.9])
def test_a_damaged_backup_is_refused_and_leaves_nothing(tmp_path: Path, place: float) -> None:
    directory = make_run(tmp_path / "run")
    file = tmp_path / "run.backup"
    write_backup(directory, database(directory), file)
    whole = bytearray(file.read_bytes())
    with tarfile.open(file) as archive:
        members = archive.getmembers()
    target = members[int(place * (len(members) - 1))]
    whole[target.offset_data] ^= 1
    file.write_bytes(whole)
    with pytest.raises(StorageError, match="cannot be read"):
        read_backup(file, tmp_path / "again")
    file.write_bytes(whole[: int(place * len(whole))])
    with pytest.raises(StorageError, match="cannot be read"):
        read_backup(file, tmp_path / "again")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.backup"}


@pytest.mark.parametrize(
    "name", ["../evil", "/tmp/evil", "evil.toml", "checkpoints/step-1/../../evil", "adapters/v1/deep/evil", "hub.key"]
)
def test_an_unexpected_file_in_a_backup_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "run.backup"
    with tarfile.open(file, "w") as archive:
        for member in ("hub.key", name):
            archive.addfile(tarfile.TarInfo(member), io.BytesIO())
        manifest = json.dumps({"format": 1, "made_at": 0, "trained_step": 0, "sha256": {}}).encode()
        about = tarfile.TarInfo(MANIFEST)
        about.size = len(manifest)
        archive.addfile(about, io.BytesIO(manifest))
    with pytest.raises(StorageError, match="does not belong"):
        read_backup(file, tmp_path / "again")
    assert {path.name for path in tmp_path.iterdir()} == {"run.backup"}


def test_a_link_is_refused(tmp_path: Path) -> None:
    link = tarfile.TarInfo("hub.key")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / "run.backup", "w") as archive:
        archive.addfile(link)
    with pytest.raises(StorageError, match="does not belong"):
        read_backup(tmp_path / "run.backup", tmp_path / "again")


def test_a_file_that_is_no_backup_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for name in ("text", "missing", "."):
        with pytest.raises(StorageError, match="cannot be read"):
            read_backup(tmp_path / name, tmp_path / "again")


@needs_mounts
def test_a_full_disk_leaves_no_half_file(tmp_path: Path, small_disk: SmallDisk) -> None:
    directory = make_run(tmp_path / "run")
    write_backup(directory, database(directory), tmp_path / "run.backup")
    size = (tmp_path / "run.backup").stat().st_size
    small_disk.fill(leave_bytes=size // 2)
    with pytest.raises(StorageError) as caught:
        write_backup(directory, database(directory), small_disk.directory / "run.backup")
    assert caught.value.code == DISK_FULL
    with pytest.raises(StorageError) as caught:
        read_backup(tmp_path / "run.backup", small_disk.directory / "again")
    assert caught.value.code == DISK_FULL
    assert [path.name for path in small_disk.directory.iterdir()] == ["ballast"]


@needs_mounts
def test_a_full_disk_leaves_the_run_unchanged(tmp_path: Path, small_disk: SmallDisk) -> None:
    directory = make_run(small_disk.directory / "run")
    small_disk.fill(leave_bytes=64 * 1024)
    with pytest.raises(StorageError) as caught:
        write_backup(directory, database(directory), tmp_path / "run.backup")
    assert caught.value.code == DISK_FULL
    assert not list(directory.root.glob(".backup-*")) and not (tmp_path / "run.backup").exists()
