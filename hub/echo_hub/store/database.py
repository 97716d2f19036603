"""The connection to the database: engine, pragmas, migrations, and driver errors as errors of this project.

SQLite runs in WAL mode with synchronous=FULL: when a commit returns, it is on disk. So acknowledged data survives a
power cut, if the disk honours syncs. With NORMAL, a power cut could lose the last commits, and the database would be
behind the learner's checkpoint. The hub commits once per coordinator pass, which costs one sync. PostgreSQL does the
same by default (synchronous_commit=on).

A file that a broken disk has damaged is refused when it is opened, not after hours of work. For this, SQLite's
quick_check reads the structure of every page. From memory this takes 5 to 6 s a GB (1.3 s for 10^6 rollouts); it ends
after `CHECK_S` at the latest.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any, Final

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, create_engine, event, insert, inspect, make_url, select, update
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError

from echo_hub.store.lost_commits import is_away, surely_committed
from echo_hub.store.tables import run_meta
from echo_shared.errors import DATABASE_AWAY, DISK_FULL, ConfigError, StorageError
from echo_shared.installation import how_to_install, how_to_upgrade

log = logging.getLogger(__name__)

MIGRATIONS: Final = Path(__file__).parent / "migrations"
BUSY_TIMEOUT_MS: Final = 5_000
"""Longest time for which a commit waits for another process, such as a backup, that has locked the file."""

OLDEST_SQLITE: Final = (3, 33)
"""First SQLite release that supports UPDATE ... FROM, which updates many rows from a list of values."""
STATEMENTS: Final = 512
"""Prepared statements that SQLite's driver caches. A bulk statement has one form for each power of two of its rows."""

IDLE_TRANSACTION: Final = "60s"
"""PostgreSQL ends a transaction that is idle for this long. Otherwise, if a connection breaks, its dead transaction
would keep its locks, and the hub's next connection would wait for them.
"""
LINE: Final = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""libpq settings, used unless the URL sets them. They let the hub notice a silently vanished server within
about a minute.
"""

CHECK_S: Final = 10.0
"""Time limit of the check for damage at the start, in seconds. Damage in pages that were not checked is found when the
hub reads them.
"""

_CANNOT_OPEN: Final = "The hub's database cannot be opened."
_RESTORE: Final = (
    "Restore the run directory, checkpoints and database together, from one backup. Without a backup: the adapters are "
    "intact (echo-hub export RUN DIRECTORY), but you need a new run (echo-hub init OTHER_DIRECTORY)."
)
_MAKE_ROOM: Final = "Make room on the disk; acknowledged rollouts are safe, and nodes keep the others."
_ADVICE: Final = {
    "locked": "Close the program that holds the file open for writing.",
    "disk is full": _MAKE_ROOM,
    "no space left": _MAKE_ROOM,
    "readonly": "Make the file and its directory writable for the hub's user.",
    "unable to open": "Check that the directory exists and is writable.",
    "malformed": _RESTORE,
    "disk i/o error": f"Check the disk's health. If the file is damaged: {_RESTORE}",
    "not a database": "Point store.url at the run's own database, or restore it from a backup.",
    "connection": "Check that the database server runs and that store.url is right.",
}
"""Advice for the operator, keyed by a part of the driver's error text."""


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn errors of the database driver into StorageError."""
    try:
        yield
    except DBAPIError as error:
        text = str(error.orig)
        advice = next((advice for word, advice in _ADVICE.items() if word in text.lower()), None)
        code = DISK_FULL if advice is _MAKE_ROOM else DATABASE_AWAY if is_away(error) else None
        raise StorageError(what, got=text, do=advice, code=code) from error


_LOOK: Final[ContextVar[tuple[Engine, Connection] | None]] = ContextVar("look", default=None)


@contextmanager
def open_to_read(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that reads the state of a single commit.

    Inside a `one_look` block, yield that block's transaction instead. Raises StorageError.
    """
    look = _LOOK.get()
    with storage_errors("The hub's database cannot be read."):
        if look is not None and look[0] is engine:
            yield look[1]
            return
        # Read from one snapshot: by default, PostgreSQL gives each statement its own snapshot.
        of_one_commit = {} if engine.dialect.name == "sqlite" else {"isolation_level": "REPEATABLE READ"}
        with engine.execution_options(**of_one_commit).connect() as connection:
            yield connection


@contextmanager
def one_look(engine: Engine) -> Iterator[None]:
    """Until the `with` block ends, let all reads of this thread see the database at the same commit. Raises
    StorageError."""
    with open_to_read(engine) as connection:
        token = _LOOK.set((engine, connection))
        try:
            yield
        finally:
            _LOOK.reset(token)


@contextmanager
def open_to_write(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that waits for other writers when it begins. Raises StorageError."""
    waiting = engine.execution_options(writes=True)
    with (
        storage_errors("The hub's database cannot be written."),
        waiting.connect() as connection,
        surely_committed(connection),
    ):
        yield connection


def write_meta(connection: Connection, key: str, value: str) -> None:
    """Insert or replace one row of `run_meta`. No upsert is needed: only one thread of the hub inserts such rows."""
    if connection.execute(update(run_meta).where(run_meta.c.key == key).values(value=value)).rowcount == 0:
        connection.execute(insert(run_meta), {"key": key, "value": value})


def read_meta(connection: Connection) -> dict[str, str]:
    return {row.key: row.value for row in connection.execute(select(run_meta))}


def connect(url: str) -> Engine:
    """Return the engine for an SQLAlchemy URL, without connecting. Raises ConfigError for a URL that cannot be used.

    With the execution option `writes`, a transaction waits for other writers before it begins.
    """
    try:
        parsed = make_url(url)
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        engine = _engine(parsed)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise ConfigError(
            "The store's URL cannot be used.",
            got=str(error),
            do='Set store.url to "sqlite:////absolute/path/echo.db" or "postgresql://user@host/database"; for the '
            f"latter: {how_to_install('postgresql')}",
        ) from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _engine(url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise ConfigError(
                "The SQLite of this Python is too old.",
                got=sqlite3.sqlite_version,
                do=f"Use a Python with SQLite {OLDEST_SQLITE[0]}.{OLDEST_SQLITE[1]} or newer, or set store.url.",
            )
        return create_engine(url, connect_args={"cached_statements": STATEMENTS})
    if url.drivername != "postgresql+psycopg":
        return create_engine(url)
    line = {name: value for name, value in LINE.items() if name not in url.query}
    # Test each pooled connection before use: after a server restart, all pooled connections are dead.
    engine = create_engine(url, pool_pre_ping=True, connect_args=line)
    event.listen(engine, "connect", _prepare_postgresql)
    return engine


def _prepare_postgresql(connection: Any, _record: Any) -> None:
    connection.autocommit = True
    connection.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_TRANSACTION}'")
    connection.autocommit = False


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # Turn off the driver's own transactions. The driver begins a transaction only at the first change, so reads before
    # it would see several commits.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={BUSY_TIMEOUT_MS}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # To write, use BEGIN IMMEDIATE: if another process writes after this transaction has read, SQLite refuses its
    # writes.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def holds_run(url: str) -> bool:
    """Return True if a hub has served a run with this database. This never creates a file. Raises ConfigError,
    StorageError.
    """
    engine = connect(url)
    file = engine.url.database if engine.dialect.name == "sqlite" else None
    if file and not file.startswith("file:") and (not Path(file).is_file() or not Path(file).stat().st_size):
        return False
    try:
        with storage_errors(_CANNOT_OPEN), engine.connect() as connection:
            known = inspect(connection).has_table(run_meta.name)
            return known and connection.scalar(select(run_meta.c.value).where(run_meta.c.key == "run_id")) is not None
    finally:
        engine.dispose()


def check_undamaged(engine: Engine) -> None:
    """Raise StorageError if an SQLite file is damaged. PostgreSQL is not checked here: it checks each page that it
    reads.
    """
    if engine.dialect.name != "sqlite":
        return
    with storage_errors(_CANNOT_OPEN), engine.begin() as connection:
        in_time = Timer(CHECK_S, connection.connection.dbapi_connection.interrupt)  # type: ignore[union-attr]
        in_time.start()
        try:
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
        except OperationalError as error:
            if str(error.orig) != "interrupted":
                raise
            log.warning(
                "The database is large: the check for damage stopped after %.0f s and left the rest unchecked.", CHECK_S
            )
            return
        finally:
            in_time.cancel()
            in_time.join()
    if found != "ok":
        said = " ".join(found.split())
        raise StorageError("The hub's database is damaged.", got=f"{engine.url.database}: {said}", do=_RESTORE)


def shrink(engine: Engine) -> tuple[int, int]:
    """Shrink an SQLite file to its contents. Return its size in bytes before and after.

    No other process may have the file open, and the disk needs space for two more copies of it. Raises StorageError,
    ConfigError.
    """
    if engine.dialect.name != "sqlite":
        raise ConfigError(
            "Only an SQLite file can be shrunk; a database server manages its own space.",
            got=engine.url.render_as_string(),
            do="Leave --shrink out. PostgreSQL reuses freed space by itself; VACUUM FULL gives it back to the disk.",
        )
    path = Path(engine.url.database or "")
    before = path.stat().st_size
    with storage_errors("The hub's database cannot be shrunk."), closing(engine.raw_connection()) as connection:
        # Use the raw driver connection: VACUUM cannot run inside SQLAlchemy's transaction.
        for statement in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
            connection.cursor().execute(statement).fetchall()
    return before, path.stat().st_size


def migrate(engine: Engine) -> None:
    """Bring the schema up to date, in one transaction.

    Raises StorageError for a schema of a newer release, or of a release before 0.2.
    """
    writing, scripts = engine.execution_options(writes=True), _scripts()
    with storage_errors(_CANNOT_OPEN), writing.begin() as connection:
        current = MigrationContext.configure(connection).get_current_revision()
        if current == scripts.get_current_head():
            return
        _check_known(current, scripts)

        def steps(revision: Any, _context: MigrationContext) -> list[Any]:
            return scripts._upgrade_revs("head", revision)

        # alembic.command.upgrade does the same, but reads every migration file again.
        config = _config()
        config.attributes["connection"] = connection
        with EnvironmentContext(config, scripts, fn=steps, destination_rev="head"):
            scripts.run_env()


def check_migrated(engine: Engine) -> None:
    """Check that the schema is the one of this release. Changes nothing, because a hub may be serving.

    Raises StorageError for any other schema, and ConfigError if no hub has made the database yet.
    """
    scripts = _scripts()
    expected = scripts.get_current_head()
    current = None
    if _is_there(engine):
        with storage_errors(_CANNOT_OPEN), engine.connect() as connection:
            current = MigrationContext.configure(connection).get_current_revision()
    if current is None:
        raise ConfigError(
            "This run has not been served yet: it has no nodes.",
            got=f"no run's database at {engine.url.render_as_string()}",
            do="Serve it first: echo-hub serve RUN",
        )
    _check_known(current, scripts)
    if current != expected:
        raise StorageError(
            "The hub's database was made by an older release.",
            got=f"schema {current}; this release has {expected}",
            do="Serve the run with this release first: echo-hub serve RUN",
        )


def _check_known(current: str | None, scripts: ScriptDirectory) -> None:
    """Raise StorageError if this release has no migration from the schema revision `current`. None means an empty
    database.
    """
    known = {script.revision for script in scripts.walk_revisions()}
    if current is None or current in known:
        return
    if current < min(known):
        raise StorageError(
            "The hub's database was made by a release before 0.2.",
            got=f"schema {current}; this release reads schema {min(known)} and newer ones",
            do="Finish the run with release 0.1, or start a new run with this release: echo-hub init OTHER_DIRECTORY",
        )
    raise StorageError(
        "The hub's database was made by a newer release.",
        got=f"schema {current}; this release knows schemas up to {max(known)}",
        do=f"Upgrade this hub. {how_to_upgrade()}",
    )


def _is_there(engine: Engine) -> bool:
    """Return False for an SQLite file that is missing or empty: to connect would create a database there."""
    if engine.dialect.name != "sqlite" or engine.url.query.get("uri"):
        return True
    path = Path(engine.url.database or "")
    return path.is_file() and path.stat().st_size > 0


@cache
def _scripts() -> ScriptDirectory:
    """Return the migrations. Read once in each process, because Alembic compiles the files each time."""
    return ScriptDirectory.from_config(_config())


def _config() -> Config:
    config = Config(attributes={})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config
