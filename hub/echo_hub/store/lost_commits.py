"""A commit whose answer is lost with the connection may have happened: who wrote finds out before it writes again.

    BEGIN ... UPDATE run_meta SET value = MARK WHERE key = 'last_write'; COMMIT ──x  the line breaks
    once the server answers: SELECT value ... FOR UPDATE                             is it MARK? Then it is committed.

The row's lock makes the answer final: it waits for a COMMIT that is still on its way. PostgreSQL's own pg_xact_status
cannot say it: a transaction's number that no log has kept is given out again after a crash. The row is of the hub's
writer alone, and SQLite needs none of this: its commits have no way to go.
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
from echo_shared.room import Room

LAST_WRITE: Final = "last_write"
_ROW: Final = run_meta.c.key == LAST_WRITE
_MARK: Final = update(run_meta).where(_ROW)
_LOOK: Final = select(run_meta.c.value).where(_ROW).with_for_update()
_WAITS: Final[ContextVar[Room | None]] = ContextVar("waits", default=None)

_SERVER_GONE: Final = frozenset({"57P01", "57P02", "57P03", "53300"})
"""SQLSTATE: it shuts down, has crashed, cannot be connected to now, has too many connections."""
_REFUSALS: Final = ("authentication", "does not exist", "pg_hba", "permission denied", "not permitted", "certificate")
"""Words of a server that was reached, and lets nobody in by these settings."""


def is_away(error: DBAPIError) -> bool:
    """Whether it is cured by nothing but the server's return: the connection is lost, or none can be made now."""
    if error.connection_invalidated:
        return True
    state: str | None = getattr(error.orig, "sqlstate", "")  # SQLite's errors have none.
    if state:
        return state.startswith("08") or state in _SERVER_GONE
    is_connecting = state is None and error.statement is None
    return is_connecting and not any(word in str(error.orig).lower() for word in _REFUSALS)


@contextmanager
def finding_out(room: Room) -> Iterator[None]:
    """This thread's writes are of the hub's one writer: it waits by `room` until it knows what became of them."""
    token = _WAITS.set(room)
    try:
        yield
    finally:
        _WAITS.reset(token)


def prepare(engine: Engine) -> None:
    """Makes the row, once in a run's life. Raises what the driver raises."""
    if engine.dialect.name != "sqlite":
        with engine.begin() as connection:
            if connection.scalar(select(run_meta.c.value).where(_ROW)) is None:
                connection.execute(insert(run_meta), {"key": LAST_WRITE, "value": ""})


@contextmanager
def surely_committed(connection: Connection) -> Iterator[None]:
    """A transaction of this connection, which is committed when the block ends. Raises what the driver raises when
    nothing of it is written, and StorageError where that is not known."""
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
                "The connection to the hub's database broke while it was written: it is not known whether it was.",
                got=str(error.orig),
                do="Look whether it is done; if it is not, do it again.",
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
