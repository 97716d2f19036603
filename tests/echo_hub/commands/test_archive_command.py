"""`echo-hub archive` writes old steps to files and removes them from the store; a kill in the middle loses nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from echo_hub.config.file import load_config
from echo_hub.lifecycle import archive as module
from echo_hub.main import app
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.browsing import NEWEST, find_rollouts
from echo_hub.store.database import write_meta
from echo_hub.store.reading import read_receipts
from echo_hub.store.reports import read_accounting
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError, StorageError
from echo_shared.records.rollout import RolloutFilter
from tests.echo_hub.written_steps import evaluated, train

parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

STEPS = 8
PRUNED = 6
DRIVER = """
import os, signal, sys
from echo_hub import main
from echo_hub.lifecycle import archive

what, count = sys.argv[1], int(sys.argv[2])
archive.ROWS_A_FILE, archive.ROWS_AT_ONCE = 4, 2
original, done = getattr(archive, what), 0

def killed(*given, **named):
    global done
    done += 1
    found = original(*given, **named)
    if done == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return found

setattr(archive, what, killed)
sys.argv = ["echo-hub", *sys.argv[3:]]
main.app()
"""


def said(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def did(*arguments: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said("archive", *arguments, "--json"))
    return found


on_both_databases = pytest.mark.parametrize("run", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    """Make a run of eight steps. Each step has a group of two rollouts, and one dropped rollout; the store has deleted
    the tokens of the first six steps. The database is SQLite unless the test asks for PostgreSQL."""
    directory = RunDirectory(tmp_path / "run")
    url = request.getfixturevalue("empty_postgresql") if getattr(request, "param", "") == "postgresql" else ""
    make_run(directory, load_config(None, {"store": {"url": url}}))
    store = Store.open(url or directory.database_url)
    store.write(write_meta, "run_id", "run-1")
    for step in range(1, STEPS + 1):
        train(store, step, components={"score": 1.0, "format": 0.5})
    store.record_evaluations(evaluated(2, 0.5))
    store.prune(PRUNED)
    store.close()
    return directory


def store_of(run: RunDirectory) -> Store:
    return Store.open(load_config(run.config, {}).store.url or run.database_url)


def books_of(run: RunDirectory) -> list[Any]:
    store = store_of(run)
    found = store.read(find_rollouts, RolloutFilter(), NEWEST, 1_000).rollouts
    store.close()
    return list(reversed(found))


def archived(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob("*.parquet")) for row in parquet.read_table(path).to_pylist()]


@on_both_databases
def test_old_steps_go_into_files_and_only_then_out_of_the_books(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_A_FILE", 4)
    folder, before = tmp_path / "archive", books_of(run)
    written = did(run.root, folder, "--before-step", "6")
    assert [(one["file"], one["rollouts"], one["deleted"]) for one in written["files"]] == [
        ("steps-000001-000002.parquet", 6, 0),
        ("steps-000003-000004.parquet", 6, 0),
        ("steps-000005-000005.parquet", 3, 0),
    ]
    assert books_of(run) == before, "nothing was requested to be deleted"
    assert did(run.root, folder, "--before-step", "6")["files"] == [], "all steps are archived already"
    rows = archived(folder)
    there = [one for one in before if one.step <= 5]
    assert [row["rollout_id"] for row in rows] == [one.rollout_id for one in there]
    for row, one in zip(rows, there, strict=True):
        same = ("step", "node_id", "policy_version", "state", "drop_reason", "reward", "num_tokens", "leased_at")
        assert [row[name] for name in same] == [getattr(one, name) for name in same]
    trained, _, lost = rows[:3]
    assert trained["completion_ids"] == [5, 6, 1] and trained["behavior_logprobs"] == [0.0] * 3
    assert trained["completion"] and trained["prompt"] and trained["advantage"] == 0.0
    assert trained["components"] == [("score", 1.0), ("format", 0.5)]
    assert (lost["state"], lost["completion"], lost["advantage"]) == ("dropped", None, None)

    gone = did(run.root, folder, "--before-step", "5", "--delete")
    assert [(one["last_step"], one["written"], one["deleted"]) for one in gone["files"]] == [
        (2, False, 6),
        (4, False, 6),
    ]
    assert [one.step for one in books_of(run)] == [step for step in (5, 6, 7, 8) for _ in range(3)]
    rest = said("archive", run.root, folder, "--delete")
    assert (
        "Wrote steps-000006-000006.parquet: 3 rollouts of steps 6 to 6" in rest and "deleted from the database" in rest
    )
    assert archived(folder)[: len(rows)] == rows, "files never change"
    assert [one.step for one in books_of(run)] == [7] * 3 + [8] * 3
    assert "Nothing to do" in said("archive", run.root, folder, "--delete")
    audit = json.loads(said("audit", run.root, "--json"))["actions"]
    assert [one["request"]["steps"] for one in audit] == ["6 to 6", "5 to 5", "3 to 4", "1 to 2"]
    assert {one["action"] for one in audit} == {"archive"}
    with pytest.raises(ConfigError, match="cannot be undone"):
        said("undo", run.root, str(audit[0]["number"]))
    assert "18 rollouts, of the steps up to 6, are no longer in the database" in said("rollouts", run.root)
    assert json.loads(said("rollouts", run.root, "--json"))["retired_step"] == 6


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize(
    ("run", "what", "count"),
    [("sqlite", "sync", 1), ("sqlite", "sync", 2), ("sqlite", "retire", 2), ("postgresql", "retire", 2)],
    ids=["before a file has its name", "before its rows go", "among its rows", "among its rows, PostgreSQL"],
    indirect=["run"],
)
def test_after_kill_9_the_next_archive_continues(run: RunDirectory, tmp_path: Path, what: str, count: int) -> None:
    folder, before = tmp_path / "archive", books_of(run)
    command = [sys.executable, "-c", DRIVER, what, str(count), "archive", str(run.root), str(folder), "--delete"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    there = {row["rollout_id"] for row in archived(folder)} | {one.rollout_id for one in books_of(run)}
    assert there == {one.rollout_id for one in before}, "each rollout that left the store is in a file"
    did(run.root, folder, "--delete")
    assert [row["rollout_id"] for row in archived(folder)] == [one.rollout_id for one in before if one.step <= PRUNED]
    assert [one.step for one in books_of(run)] == [7] * 3 + [8] * 3
    assert sorted(path.suffix for path in folder.iterdir() if path.name != ".lock") == [".parquet"] * len(
        list(folder.glob("*.parquet"))
    )
    store = store_of(run)
    accounting, receipts = store.read(read_accounting), store.read(read_receipts, "a", ["1-0", "3-2", "6-1"])
    store.close()
    assert accounting.balanced and accounting.trained == 2 * STEPS
    assert [one.state for one in receipts] == ["trained", "dropped", "trained"]


def test_rollouts_dropped_before_are_reported_as_not_archived(run: RunDirectory, tmp_path: Path) -> None:
    said("archive", run.root, tmp_path / "first", "--before-step", "3", "--delete")
    assert "Steps 1 to 2 were deleted from the database before" in said("archive", run.root, tmp_path / "other")
    assert did(run.root, tmp_path / "other")["missing_steps"] == [[1, 2]]
    assert [row["step"] for row in archived(tmp_path / "other")] == [step for step in (3, 4, 5, 6) for _ in range(3)]


def test_a_damaged_file_keeps_the_rows_in_the_books(run: RunDirectory, tmp_path: Path) -> None:
    folder, before = tmp_path / "archive", books_of(run)
    said("archive", run.root, folder)
    (path,) = folder.glob("*.parquet")
    whole = path.read_bytes()
    columns = parquet.ParquetFile(path).metadata.row_group(0)
    for column in map(columns.column, range(columns.num_columns)):
        end = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 1
        if column.path_in_schema.startswith(("rollout_id", "completion", "reward")):
            path.write_bytes(whole[:end] + bytes([whole[end] ^ 1]) + whole[end + 1 :])
            with pytest.raises(StorageError, match="damaged"):
                said("archive", run.root, folder, "--delete")
    path.write_bytes(whole[:-9])
    with pytest.raises(StorageError, match="damaged"):
        said("archive", run.root, folder, "--delete")
    assert books_of(run) == before
    path.write_bytes(whole)
    said("archive", run.root, folder, "--delete")
    assert len(books_of(run)) == 6


def test_files_of_another_run_or_history_are_never_mixed_with_these(run: RunDirectory, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    said("archive", run.root, folder)
    store = store_of(run)
    store.write(write_meta, "run_id", "run-2")
    with pytest.raises(ConfigError, match="files that are not this run's archive") as caught:
        said("archive", run.root, folder)
    assert "run-1" in str(caught.value)
    store.write(write_meta, "run_id", "run-1")
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE steps SET trained_at = 7 WHERE step = 6")
    store.close()
    with pytest.raises(ConfigError, match="does not match the run's database"):
        said("archive", run.root, folder, "--delete")
    (path,) = folder.glob("*.parquet")
    parquet.write_table(parquet.read_table(path).replace_schema_metadata({}), path)
    with pytest.raises(ConfigError, match="files that are not this run's archive"):
        said("archive", run.root, folder)


def test_a_missing_file_of_stored_rows_stops_the_archive(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_A_FILE", 4)
    folder = tmp_path / "archive"
    said("archive", run.root, folder)
    (folder / "steps-000003-000004.parquet").unlink()
    with pytest.raises(ConfigError, match="missing") as caught:
        said("archive", run.root, folder, "--delete")
    assert "no file for steps 3 to 4" in str(caught.value)


def test_a_full_or_readonly_place_is_named(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="archive cannot be written"):
        said("archive", run.root, tmp_path / "file" / "archive")


@on_both_databases
def test_the_file_of_the_books_becomes_smaller_when_asked(run: RunDirectory, tmp_path: Path) -> None:
    if load_config(run.config, {}).store.url:
        with pytest.raises(ConfigError, match="Only an SQLite file can be shrunk"):
            said("archive", run.root, tmp_path / "archive", "--delete", "--shrink")
        return
    store = store_of(run)
    for step in range(STEPS + 1, 60):
        train(store, step)
    store.prune(60)
    store.close()
    shrunk = did(run.root, tmp_path / "archive", "--delete", "--shrink")["shrunk"]
    assert shrunk["after_bytes"] < shrunk["before_bytes"]
    assert shrunk["after_bytes"] == (run.root / "echo.db").stat().st_size
    with run.locked(), pytest.raises(StorageError):
        said("archive", run.root, tmp_path / "archive", "--shrink")
