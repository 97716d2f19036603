"""Find out whether a COMMIT took effect, after the connection has broken during it, before writing again.

    BEGIN ... UPDATE run_meta SET value = MARK WHERE key = 'last_write'; COMMIT ──x  the connection breaks
    once the server answers: SELECT value ... FOR UPDATE                             if it is MARK: committed

The row's lock makes the answer final: the SELECT waits until a pending COMMIT has finished. PostgreSQL's pg_xact_status
cannot answer this: after a crash, PostgreSQL reuses the number of a transaction that left nothing in the log. Only the
hub's writer uses this row. SQLite needs none of this: its commits cross no network.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from sqlalchemy import Connection, Engine, RootTransaction, insert, select, update
from sqlalchemy.exc import DBAPIError

from echo_hub.store.tables import run_meta
from echo_shared.errors import DATABASE_AWAY, StorageError
from echo_shared.files.full_disk import Room

LAST_WRITE: Final = "last_write"
_ROW: Final = run_meta.c.key == LAST_WRITE
_MARK: Final = update(run_meta).where(_ROW)
_LOOK: Final = select(run_meta.c.value).where(_ROW).with_for_update()
_WAITS: Final[ContextVar[Room | None]] = ContextVar("waits", default=None)

_SERVER_GONE: Final = frozenset({"57P01", "57P02", "57P03", "53300"})
"""SQLSTATEs of a server that shuts down, has crashed, cannot accept connections now, or has too many connections."""
_REFUSALS: Final = ("authentication", "does not exist", "pg_hba", "permission denied", "not permitted", "certificate")
"""Parts of error texts with which a reachable server refuses the connection settings. Waiting does not help against
these errors.
"""


def is_away(error: DBAPIError) -> bool:
    """Return True if waiting for the server can help: the connection is lost, or cannot be made now."""
    if error.connection_invalidated:
        return True
    state: str | None = getattr(error.orig, "sqlstate", "")  # SQLite's errors have no sqlstate.
    if state:
        return state.startswith("08") or state in _SERVER_GONE
    is_connecting = state is None and error.statement is None
    return is_connecting and not any(word in str(error.orig).lower() for word in _REFUSALS)


@contextmanager
def finding_out(room: Room) -> Iterator[None]:
    """Inside the `with` block, treat this thread's writes as the hub's own. If such a write loses its connection during
    COMMIT, it lets `room` wait and retry until the server tells whether the commit took effect.
    """
    token = _WAITS.set(room)
    try:
        yield
    finally:
        _WAITS.reset(token)


def prepare(engine: Engine) -> None:
    """Insert the row of `run_meta` that marks the last write, if the row is missing. Raises the driver's errors."""
    if engine.dialect.name != "sqlite":
        with engine.begin() as connection:
            if connection.scalar(select(run_meta.c.value).where(_ROW)) is None:
                connection.execute(insert(run_meta), {"key": LAST_WRITE, "value": ""})


@contextmanager
def surely_committed(connection: Connection) -> Iterator[None]:
    """Run the code of the `with` block in a transaction, and commit at the block's end.

    Raises the driver's error if nothing was written, and StorageError if it is unknown whether the commit took effect.
    """
    room = None if connection.dialect.name == "sqlite" else _WAITS.get()
    mark = secrets.token_hex(8)
    with connection.begin() as transaction:
        yield
        if room is not None:
            connection.execute(_MARK.values(value=mark))
        _commit(transaction, connection.engine, mark, room)


def _commit(transaction: RootTransaction, engine: Engine, mark: str, room: Room | None) -> None:
    try:
        transaction.commit()
    except DBAPIError as error:
        if not is_away(error):
            raise
        if room is None:
            raise StorageError(
                "The connection to the hub's database broke during a commit: the change may or may not be stored.",
                got=str(error.orig),
                do="Check whether the change is there; if not, run the command again.",
            ) from error
        if room.until(lambda: _last_write(engine)) != mark:
            raise


def _last_write(engine: Engine) -> str | None:
    try:
        with engine.begin() as connection:
            return connection.scalar(_LOOK)
    except DBAPIError as error:
        code = DATABASE_AWAY if is_away(error) else None
        raise StorageError("The hub's database cannot be read.", got=str(error.orig), code=code) from error
