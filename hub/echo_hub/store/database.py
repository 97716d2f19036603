"""The connection: engine, pragmas, migrations, and what a database error means in the project's words.

SQLite runs in WAL mode with synchronous=FULL: a commit is on the disk when it returns, so that what was acked survives
not only a killed process (NORMAL would do for that) but also a power cut, as far as the disk keeps its own promises.
Without it the store could fall behind the learner's checkpoint. The hub commits once a turn, however many events the
turn had, so the price is one sync a turn. PostgreSQL does the same by default (synchronous_commit=on).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from echo_shared.errors import ConfigError, StorageError
from echo_shared.installation import how_to_install, how_to_upgrade

MIGRATIONS: Final = Path(__file__).parent / "migrations"
BUSY_TIMEOUT_MS: Final = 5_000
"""How long a commit waits for another process (a backup, an export) that holds the file."""

_CANNOT_OPEN: Final = "The hub's database cannot be opened."
_ADVICE: Final = {
    "locked": "Close the program that holds the file open for writing.",
    "full": "Make room on the disk; what was acked is safe, and nodes keep the rest.",
    "readonly": "Make the file and its directory writable for the hub's user.",
    "unable to open": "Check that the directory exists and is writable.",
    "malformed": "Restore the run directory from a backup.",
    "not a database": "Point store.url at the run's own database, or restore it from a backup.",
    "connection": "Check that the database server runs and that store.url is right.",
}
"""By a word of the driver's text."""


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turns what the database driver raises into StorageError."""
    try:
        yield
    except DBAPIError as error:
        text = str(error.orig)
        advice = next((advice for word, advice in _ADVICE.items() if word in text.lower()), None)
        raise StorageError(what, got=text, do=advice) from error


def connect(url: str) -> Engine:
    """The engine of an SQLAlchemy URL. Opens nothing yet. Raises ConfigError when the URL makes no sense.

    Transactions with the execution option `writes` wait for other writers before they begin.
    """
    try:
        parsed = make_url(url)
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        engine = create_engine(parsed)
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


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # The driver would begin transactions by itself, too late and not for everything: SQLAlchemy does it instead.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={BUSY_TIMEOUT_MS}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that has read before another process wrote may not write any more, however long it would wait.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def migrate(engine: Engine) -> None:
    """Brings the schema up to date, in one transaction. Raises StorageError when it is newer than this software."""
    config, writing = _config(), engine.execution_options(writes=True)
    with storage_errors(_CANNOT_OPEN), writing.begin() as connection:
        current = MigrationContext.configure(connection).get_current_revision()
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if current is not None and current not in known:
            raise StorageError(
                "The hub's database was made by a newer version of this software.",
                got=f"schema {current}; this software knows {max(known)}",
                do=f"Upgrade this hub. {how_to_upgrade()}",
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def check_migrated(engine: Engine) -> None:
    """Raises StorageError unless the schema is this software's; changes nothing, for a hub may be serving."""
    expected = ScriptDirectory.from_config(_config()).get_current_head()
    with storage_errors(_CANNOT_OPEN), engine.connect() as connection:
        current = MigrationContext.configure(connection).get_current_revision()
    if current != expected:
        raise StorageError(
            "The hub's database is not of this version of the software.",
            got="an empty database" if current is None else f"schema {current}; this software has {expected}",
            do="Serve the run with this version first: echo-hub serve RUN",
        )


def _config() -> Config:
    config = Config(attributes={})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config
