from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_hub.config.file import load_config
from echo_hub.main import app
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.reports import read_newest_step
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError
from tests.echo_hub.written_steps import train


def said(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def run_with(root: Path, *, url: str = "") -> RunDirectory:
    directory = RunDirectory(root)
    make_run(directory, load_config(None, {"store": {"url": url}}))
    store = Store.open(url or directory.database_url)
    train(store, 1)
    store.close()
    return directory


def test_a_run_is_put_into_a_file_and_back(tmp_path: Path) -> None:
    directory = run_with(tmp_path / "run")
    told = said("backup", directory.root, tmp_path / "run.backup")
    assert "1 steps trained" in told and "hub.key" in told and "Keep it secret" in told
    told = said("restore", tmp_path / "run.backup", tmp_path / "again")
    assert "Key fingerprint: " in told and "Never serve it while" in told
    assert (tmp_path / "again" / "hub.key").read_bytes() == directory.key.read_bytes()
    assert (tmp_path / "again" / "config.toml").read_bytes() == directory.config.read_bytes()


def test_a_database_outside_the_run_is_restored_into_the_run_directory(tmp_path: Path) -> None:
    directory = run_with(tmp_path / "run", url=f"sqlite:///{tmp_path / 'books.db'}")
    said("backup", directory.root, tmp_path / "run.backup")
    assert "store.url is now empty" in said("restore", tmp_path / "run.backup", tmp_path / "again")
    again = RunDirectory(tmp_path / "again")
    assert load_config(again.config, {}).store.url == ""
    store = Store.open(again.database_url)
    assert store.read(read_newest_step) is not None
    store.close()


def test_books_in_postgresql_are_left_to_pg_dump(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    make_run(directory, load_config(None, {"store": {"url": "postgresql://me:hunter2@127.0.0.1/books"}}))
    with pytest.raises(ConfigError, match="not an SQLite file") as caught:
        said("backup", directory.root, tmp_path / "run.backup")
    assert "pg_dump" in str(caught.value) and "hunter2" not in str(caught.value)


def test_a_run_that_was_never_served_has_nothing_to_back_up(tmp_path: Path) -> None:
    make_run(RunDirectory(tmp_path / "run"), load_config(None, {}))
    with pytest.raises(ConfigError, match="has not been served yet"):
        said("backup", tmp_path / "run", tmp_path / "run.backup")
    with pytest.raises(ConfigError, match="not a run directory"):
        said("backup", tmp_path / "nowhere", tmp_path / "run.backup")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
