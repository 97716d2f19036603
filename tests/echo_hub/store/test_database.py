from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import func, inspect, select, text

from echo_hub.store import database
from echo_hub.store.database import connect, holds_run, migrate, open_to_read, read_meta, write_meta
from echo_hub.store.known_nodes import ban_nodes, read_banned_nodes
from echo_hub.store.reports import read_accounting, read_leaderboard, read_num_nodes
from echo_hub.store.store import Store
from echo_hub.store.tables import metadata, nodes
from echo_hub.store.unfinished import read_snapshot
from echo_shared.errors import ConfigError, StorageError


def file_url(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return file_url(tmp_path / "echo.db")
    return str(request.getfixturevalue("empty_postgresql"))


def test_migrations_make_exactly_the_tables(url: str) -> None:
    engine = connect(url)
    migrate(engine)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    migrate(engine)
    engine.dispose()


@pytest.fixture
def next_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add a migration with a new column to this release's migrations."""
    directory = tmp_path / "migrations"
    shutil.copytree(database.MIGRATIONS, directory)
    head = database._scripts().get_current_head()
    (directory / "versions" / "9999_next.py").write_text(
        "import sqlalchemy as sa\nfrom alembic import op\n"
        f'revision, down_revision, branch_labels, depends_on = "9999", "{head}", None, None\n'
        'def upgrade() -> None:\n    op.add_column("nodes", sa.Column("colour", sa.Text))\n'
    )
    monkeypatch.setattr(database, "MIGRATIONS", directory)
    database._scripts.cache_clear()
    yield
    database._scripts.cache_clear()


def test_the_next_release_migrates_a_run_of_this_one(store: Store, next_release: None) -> None:
    store.write(write_meta, "run_id", "r")
    url = store.engine.url.render_as_string(hide_password=False)
    with pytest.raises(StorageError, match=r"(?s)an older release.*schema 00\d\d.*has 9999.*echo-hub serve RUN"):
        Store.open(url, beside_hub=True)
    migrate(store.engine)
    with store.engine.connect() as connection:
        assert "colour" in {column["name"] for column in inspect(connection).get_columns("nodes")}
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "9999"
    beside = Store.open(url, beside_hub=True)
    assert beside.read(read_meta)["run_id"] == "r"
    beside.close()


def test_a_commit_is_on_the_disk_when_it_returns(tmp_path: Path) -> None:
    engine = connect(file_url(tmp_path / "echo.db"))
    with engine.connect() as connection:
        assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
        assert connection.scalar(text("PRAGMA synchronous")) == 2
    engine.dispose()


@pytest.mark.parametrize("beside_hub", [False, True])
@pytest.mark.parametrize(
    ("revision", "error"),
    [
        ("0001", r"(?s)a release before 0\.2.*schema 0001.*reads schema 0030.*Finish.*0\.1.*echo-hub init"),
        ("0029", r"(?s)a release before 0\.2.*schema 0029.*reads schema 0030.*Finish.*0\.1.*echo-hub init"),
        ("9999", r"(?s)a newer release.*schema 9999.*up to \d{4}.*Upgrade"),
    ],
)
def test_another_schema_is_refused_and_left_alone(tmp_path: Path, revision: str, error: str, beside_hub: bool) -> None:
    path = tmp_path / "echo.db"
    Store.open(file_url(path)).close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        layout = raw.execute("SELECT sql FROM sqlite_master").fetchall()
    raw.close()
    with pytest.raises(StorageError, match=error):
        Store.open(file_url(path), beside_hub=beside_hub)
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT version_num FROM alembic_version").fetchall() == [(revision,)]
        assert raw.execute("SELECT sql FROM sqlite_master").fetchall() == layout
    raw.close()


@pytest.mark.parametrize("content", [None, b""])
def test_opening_a_run_that_was_never_served_creates_no_database(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "echo.db"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"(?s)not been served yet.*echo-hub serve"):
        Store.open(file_url(path), beside_hub=True)
    assert [found.read_bytes() for found in tmp_path.iterdir()] == ([] if content is None else [b""])


def test_opening_another_programs_database_leaves_it_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE notes (text)")
    raw.close()
    with pytest.raises(ConfigError, match="not been served yet"):
        Store.open(file_url(path), beside_hub=True)
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT name FROM sqlite_master").fetchall() == [("notes",)]
    raw.close()


def test_a_second_process_opens_the_hubs_database(url: str) -> None:
    hub = Store.open(url)
    beside = Store.open(url, beside_hub=True)
    hub.node_seen(node_id="a", public_key=b"k", name="a", backend="torch", device="c", now=1.0)
    beside.write(ban_nodes, ["a"], now=2.0)
    assert hub.read(read_banned_nodes) == {"a"}
    beside.close()
    hub.close()


def test_migrating_waits_for_another_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 1)
    path = tmp_path / "echo.db"
    Store.open(file_url(path)).close()
    other = sqlite3.connect(path)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match=r"(?s)cannot be opened.*locked"):
        Store.open(file_url(path))
    other.rollback()
    other.close()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "echo.db"
    path.write_text("these are my holiday notes, " * 100)
    with pytest.raises(StorageError, match=r"(?s)cannot be opened.*not a database.*store\.url"):
        Store.open(file_url(path))


def test_a_damaged_file_is_an_error_not_a_wrong_answer(tmp_path: Path, records: Any) -> None:
    path = tmp_path / "echo.db"
    store = Store.open(file_url(path))
    for step in range(1, 60):
        store.apply(records.one_step(step, lease_id=step, group_id=step - 1), now=1.0)
    store.close()
    content = bytearray(path.read_bytes())
    content[8192:] = b"\xa5" * (len(content) - 8192)
    path.write_bytes(content)
    with pytest.raises(StorageError):
        damaged = Store.open(file_url(path))
        damaged.read(read_accounting)


@pytest.fixture
def damaged(tmp_path: Path, records: Any) -> Path:
    """Return a database file with twenty pages of noise in its middle, as a failing disk could leave it."""
    path = tmp_path / "echo.db"
    store = Store.open(file_url(path))
    store.apply(records.opened(*range(20_000)), now=1.0)
    store.close()
    content = bytearray(path.read_bytes())
    middle = len(content) // 4096 // 2 * 4096
    content[middle : middle + 20 * 4096] = random.Random(0).randbytes(20 * 4096)
    path.write_bytes(content)
    return path


def test_damage_in_the_middle_is_found_at_the_start(damaged: Path) -> None:
    with pytest.raises(StorageError, match=r"(?s)database is damaged.*echo\.db: .*one backup.*echo-hub export"):
        Store.open(file_url(damaged))


def test_looking_for_damage_ends_when_it_takes_too_long(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Large databases are checked for damage for a limited time only. Damage in the rest must be reported when it is
    read.
    """

    class Impatient:
        """A timer that ends at once, so that SQLite's check is interrupted at its first step."""

        def __init__(self, seconds: float, interrupt: Any) -> None:
            self.connection, self.interrupt = interrupt.__self__, interrupt

        def start(self) -> None:
            self.connection.set_progress_handler(self.interrupt, 1)

        def cancel(self) -> None:
            self.connection.set_progress_handler(None, 0)

        def join(self) -> None: ...

    monkeypatch.setattr(database, "Timer", Impatient)
    store = Store.open(file_url(damaged))
    assert "left the rest unchecked" in caplog.text
    with pytest.raises(StorageError, match=r"(?s)malformed.*one backup.*echo-hub export"):
        store.read(read_snapshot)
    store.close()


def test_a_database_that_is_whole_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        Store.open(file_url(tmp_path / "echo.db")).close()
    assert caplog.text == ""


@pytest.mark.parametrize("server", ["sqlite", "postgresql"])
def test_a_database_holds_a_run_once_the_run_has_its_id(
    server: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "echo.db"
    if server == "postgresql":
        url = str(request.getfixturevalue("postgresql_url"))
        engine = connect(url)
        with engine.begin() as connection:
            connection.execute(text("DROP SCHEMA public CASCADE"))
            connection.execute(text("CREATE SCHEMA public"))
        engine.dispose()
    else:
        url = file_url(path)
        assert not holds_run(url)
        assert not path.exists(), "the look creates no file"
        path.write_bytes(b"")
    assert not holds_run(url)
    store = Store.open(url)
    assert not holds_run(url)
    store.write(write_meta, "run_id", "r")
    assert holds_run(url)
    store.close()


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"(?s)cannot be opened.*unable to open.*directory exists"):
        Store.open(file_url(tmp_path / "no" / "such" / "echo.db"))


def test_a_locked_file_is_an_error_that_loses_nothing(
    tmp_path: Path, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 1)
    path = tmp_path / "echo.db"
    store = Store.open(file_url(path))
    other = sqlite3.connect(path)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match=r"(?s)cannot be written.*locked.*Close the program"):
        store.apply(records.opened(0), now=1.0)
    other.rollback()
    other.close()
    store.apply(records.opened(0), now=1.0)
    assert store.read(read_snapshot).next_group_id == 1
    store.close()


def test_a_full_disk_is_an_error_that_loses_nothing(tmp_path: Path, records: Any) -> None:
    """Limit SQLite's pages in place of a full disk: writes fail at the same place, with the same error code."""
    store = Store.open(file_url(tmp_path / "echo.db"))
    store.apply(records.one_step(1, lease_id=1, group_id=0), now=1.0)
    before = store.read(read_snapshot)
    with store.engine.connect() as connection:
        pages = connection.scalar(text("PRAGMA page_count"))
        connection.execute(text(f"PRAGMA max_page_count = {pages}"))
    with pytest.raises(StorageError, match=r"(?s)cannot be written.*full.*Make room"):
        store.apply(records.opened(*range(1, 5_000)), now=2.0)
    assert store.read(read_snapshot) == before
    store.close()


@pytest.mark.parametrize("url", ["not a url", "nosuchdatabase://x/y", "mysql+nosuchdriver://x/y", ""])
def test_a_bad_url_is_a_mistake_in_the_settings(url: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)URL cannot be used.*Set store\.url"):
        Store.open(url)


def test_a_postgresql_server_that_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    with pytest.raises(StorageError, match=r"(?s)cannot be opened.*server runs"):
        Store.open(f"postgresql://echo@/postgres?host={tmp_path}")


def test_reads_in_one_look_see_one_commit(store: Store) -> None:
    """Pages must not show figures of different commits together, even if another process writes meanwhile."""

    def join(name: str) -> None:
        store.node_seen(node_id=name, public_key=name.encode(), name=name, backend="", device="d", now=7.0)

    join("before")
    with store.one_look():
        assert store.read(read_num_nodes).known == 1
        with ThreadPoolExecutor(1) as another:
            another.submit(join, "meanwhile").result()
            assert another.submit(store.read, read_num_nodes).result().known == 2, (
                "another thread does not share this look"
            )
        assert (store.read(read_num_nodes).known, len(store.read(read_leaderboard))) == (1, 1)
    assert store.read(read_num_nodes).known == 2
    with open_to_read(store.engine) as connection:
        assert connection.scalar(select(func.count()).select_from(nodes)) == 2
        join("later")
        assert connection.scalar(select(func.count()).select_from(nodes)) == 2


def test_a_look_that_fails_is_over(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.one_look():
        raise ZeroDivisionError
    store.node_seen(node_id="n", public_key=b"n", name="n", backend="", device="d", now=7.0)
    assert store.read(read_num_nodes).known == 1


def test_an_sqlite_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 32, 3))
    with pytest.raises(ConfigError, match="too old"):
        connect(f"sqlite:///{tmp_path}/echo.db")
