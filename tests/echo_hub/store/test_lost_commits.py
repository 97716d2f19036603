"""If the connection to a real PostgreSQL server breaks during a commit, the hub cannot know if the server has
committed. It must nevertheless write everything exactly once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from benchmarks.harness.postgresql import PostgreSQL
from echo_hub.core.accounting.effects import Record
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.database import open_to_write, read_meta, write_meta
from echo_hub.store.lost_commits import is_away
from echo_hub.store.reports import read_accounting
from echo_hub.store.store import Store
from echo_shared.errors import DATABASE_AWAY, StorageError
from echo_shared.files.full_disk import Room

SOCKET = ".s.PGSQL.5432"


@pytest.fixture
def short_directory() -> Iterator[Path]:
    # The path of a Unix socket must be short, and those of pytest's directories are long.
    with tempfile.TemporaryDirectory(prefix="echo-line-", dir="/tmp") as directory:
        yield Path(directory)


class Line:
    """Proxy between the hub and a PostgreSQL server that breaks the connection at a commit.

    `breaks_at`: "before" the commit reaches the server, "after" the server has answered (the proxy keeps the answer),
    or "between" these.
    """

    def __init__(self, server: Path) -> None:
        self._server = server
        self.breaks_at = ""
        self.num_broken = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_unix_connection(str(self._server / SOCKET))
        back = asyncio.create_task(self._hand_back(from_server, writer))
        try:
            while said := await reader.read(65_536):
                at = self.breaks_at if b"COMMIT" in said else ""
                if at:
                    self.breaks_at, self.num_broken = "", self.num_broken + 1
                if at == "before":
                    break
                if at == "after":
                    back.cancel()
                    with suppress(asyncio.CancelledError):
                        await back
                to_server.write(said)
                await to_server.drain()
                if at == "after":
                    assert await from_server.read(65_536)
                if at:
                    break
        finally:
            back.cancel()
            for end in (writer, to_server):
                end.close()

    async def _hand_back(self, from_server: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while said := await from_server.read(65_536):
                writer.write(said)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def over_a_line(server: PostgreSQL, directory: Path) -> AsyncIterator[tuple[AsyncStore, Line]]:
    line = Line(Path(server.url.partition("host=")[2]))
    listening = await asyncio.start_unix_server(line.handle, str(directory / SOCKET))
    opened = await asyncio.to_thread(Store.open, f"postgresql://echo@/postgres?host={directory}")
    store = AsyncStore(opened, server=Room(code=DATABASE_AWAY, retry_s=0.01))
    yield store, line
    await store.close()
    listening.close()


def trained(connection: Connection) -> tuple[int, int]:
    accounting = read_accounting(connection)
    assert accounting.balanced
    return accounting.leased, accounting.trained


def step(records: Any, number: int) -> list[Record]:
    """Return the records of a step. A store raises an error if it gets them twice."""
    made: list[Record] = records.one_step(number, lease_id=number, group_id=number - 1)
    return made


@pytest.mark.usefixtures("empty_postgresql")
@pytest.mark.parametrize("breaks_at", ["before", "after", "between"])
async def test_a_turn_whose_commit_is_cut_off_is_written_once(
    breaks_at: str, postgresql_server: PostgreSQL, records: Any, short_directory: Path
) -> None:
    async with over_a_line(postgresql_server, short_directory) as (store, line):
        for number in range(1, 6):
            line.breaks_at = breaks_at
            await store.apply(step(records, number), 1.0)
            assert await store.read(trained) == (2 * number, 2 * number)
        assert line.num_broken == 5 and not store.server.lacks


@pytest.mark.usefixtures("empty_postgresql")
async def test_a_lost_commit_of_another_process_is_reported_as_unknown(
    postgresql_server: PostgreSQL, short_directory: Path
) -> None:
    async with over_a_line(postgresql_server, short_directory) as (store, line):
        line.breaks_at = "after"
        with pytest.raises(StorageError, match=r"(?s)may or may not be stored.*Check whether") as caught:
            await asyncio.to_thread(store.store.write, write_meta, "a", "1")
        assert caught.value.code != DATABASE_AWAY, "the caller must not retry it"
        assert (await store.read(read_meta))["a"] == "1"


def told_of(store: AsyncStore) -> threading.Event:
    """Return an event that is set once the store waits for the server."""
    waits = threading.Event()
    store.server = Room(code=DATABASE_AWAY, retry_s=0.05, tell=lambda _: waits.set())
    return waits


@pytest.mark.usefixtures("empty_postgresql")
async def test_reads_and_writes_wait_for_a_server_that_is_away(postgresql_server: PostgreSQL, records: Any) -> None:
    store = AsyncStore(await asyncio.to_thread(Store.open, postgresql_server.url))
    waits = told_of(store)
    await store.apply(step(records, 1), 1.0)
    await asyncio.to_thread(postgresql_server.stop)
    try:
        writes = [asyncio.create_task(store.apply(step(records, number), 1.0)) for number in (2, 3)]
        read = asyncio.create_task(store.read(read_accounting))
        assert await asyncio.to_thread(waits.wait, 60)
        assert store.server.lacks and not any(one.done() for one in (*writes, read))
        with pytest.raises(StorageError, match="cannot be read") as caught:
            await asyncio.to_thread(store.store.read, read_accounting)
        assert caught.value.code == DATABASE_AWAY, "a blocking reader gets the error"
    finally:
        await asyncio.to_thread(postgresql_server.start)
    await asyncio.gather(*writes, read)
    assert await asyncio.to_thread(store.store.read, trained) == (6, 6)
    assert not store.server.lacks
    await store.close()


@pytest.mark.usefixtures("empty_postgresql")
@pytest.mark.parametrize("by", ["terminated", "killed"])
async def test_a_backend_that_ends_in_the_middle_of_a_transaction_costs_nothing(
    by: str, postgresql_server: PostgreSQL, records: Any
) -> None:
    """If one backend (process of a connection) is killed, PostgreSQL ends all backends and recovers."""
    store = AsyncStore(await asyncio.to_thread(Store.open, postgresql_server.url))
    told_of(store)
    ended = []

    def end_backend(now: float) -> None:
        original = store.store.apply
        if not ended:
            with open_to_write(store.store.engine) as connection:
                pid = connection.scalar(text("SELECT pg_backend_pid()"))
                connection.execute(text("UPDATE run_meta SET value = 'x' WHERE key = 'last_write'"))
                ended.append(pid)
                os.kill(pid, signal.SIGKILL if by == "killed" else signal.SIGTERM)
                connection.execute(text("SELECT pg_sleep(60)"))
        original(step(records, 1), now)

    await store.on_writer(end_backend, 1.0)
    assert ended and await store.read(trained) == (2, 2)
    await store.close()


@pytest.mark.usefixtures("empty_postgresql")
async def test_close_does_not_wait_for_a_stopped_server(postgresql_server: PostgreSQL) -> None:
    store = AsyncStore(await asyncio.to_thread(Store.open, postgresql_server.url))
    waits = told_of(store)
    await asyncio.to_thread(postgresql_server.stop)
    try:
        write = asyncio.create_task(store.write(write_meta, "a", "1"))
        assert await asyncio.to_thread(waits.wait, 60)
        await store.close()
        with pytest.raises(StorageError, match="cannot be written"):
            await write
    finally:
        await asyncio.to_thread(postgresql_server.start)


class Driver(Exception):
    """An error as psycopg raises it: with an SQLSTATE only if the server has sent one."""

    def __init__(self, said: str, sqlstate: str | None) -> None:
        super().__init__(said)
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("statement", "said", "sqlstate", "away"),
    [
        (None, "connection failed: Connection refused", None, True),
        (None, "FATAL:  the database system is starting up", None, True),
        (None, 'FATAL:  password authentication failed for user "hub"', None, False),
        (None, 'FATAL:  database "echo" does not exist', None, False),
        ("SELECT 1", "terminating connection due to administrator command", "57P01", True),
        ("SELECT 1", "connection does not exist", "08003", True),
        ("SELECT 1", "canceling statement due to statement timeout", "57014", False),
        ("SELECT 1", "could not extend file: No space left on device", "53100", False),
    ],
)
def test_only_errors_that_end_with_the_servers_return_count_as_away(
    statement: str | None, said: str, sqlstate: str | None, away: bool
) -> None:
    assert is_away(OperationalError(statement, None, Driver(said, sqlstate))) is away
