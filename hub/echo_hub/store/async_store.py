"""The store for code on the event loop: one thread writes, another thread reads.

SQLite has one writer, so writes are committed in the order of their calls. A write that fails because the disk is full
is retried until there is space, and all later writes wait behind it. Reads run in parallel to writes and see the last
commit before they began. While a database server is unreachable, reads and writes wait for it. A write is applied
exactly once, even if the connection breaks before the server confirms the commit.

Each change of threads takes some tenths of a millisecond, and many on a busy machine. So `apply` can read ahead: the
writing thread runs queries right after its commit, and the next equal `read` gets their results.

Web pages and curves read `store` directly on their own threads, so they never wait for these two threads.

The rollouts of a large trained step are marked as trained in parts, so that other writes can run in between.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from sqlalchemy import Connection

from echo_hub.core.accounting.effects import Record
from echo_hub.store.lost_commits import finding_out
from echo_hub.store.store import Store
from echo_shared.errors import DATABASE_AWAY, DISK_FULL, StorageError
from echo_shared.files.full_disk import Room
from echo_shared.records.run import RunEvent

OTHERS_SHARE: Final = 2.0
"""When a part of a large step's rollouts is marked as trained, the writer pauses for this multiple of the time that the
part took. Other writes run during the pause."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
Query = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """A query, and its argument: a set or a list of keys."""

    query: Query
    keys: Collection[Any]


class AsyncStore:
    """Async versions of the store's `read` and `write`, with the same errors.

    `room` repeats a write while the disk is full. `server` repeats a call while the database server is unreachable.
    """

    def __init__(self, store: Store, room: Room | None = None, server: Room | None = None) -> None:
        self.store = store
        self.room = room or Room()
        self.server = server or Room(code=DATABASE_AWAY)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        self._counting: asyncio.Task[None] | None = None
        self._num_writes = 0
        self._ahead: dict[Query, tuple[Collection[Any], Any]] = {}
        """Results of the queries that ran right after the newest commit, with their arguments. Each result is taken
        once.
        """

    async def read(self, query: Callable[Concatenate[Connection, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run `query` on the reading thread. The query sees the state of a single commit."""
        if query in self._ahead and args == self._ahead[query][:1]:
            found: _T = self._ahead.pop(query)[1]
            return found
        read = partial(self.server.until, lambda: self.store.read(query, *args, **kwargs))
        return await asyncio.get_running_loop().run_in_executor(self._reader, read)

    async def read_counted(
        self, query: Callable[Concatenate[Connection, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Wait until the rollouts of all steps trained so far are counted (marked as trained and added to the totals),
        then run `query`.
        """
        await self.counted()
        return await self.read(query, *args, **kwargs)

    async def write(
        self, command: Callable[Concatenate[Connection, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Run `command` on the writing thread, in a single transaction."""
        return await self.on_writer(partial(self.store.write, command, *args, **kwargs))

    async def on_writer(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self._num_writes += 1
        self._ahead = {}  # The write may change the results that were read ahead.

        def write() -> _T:
            with finding_out(self.server):
                return self.room.until(lambda: self.server.until(lambda: method(*args, **kwargs)))

        return await asyncio.get_running_loop().run_in_executor(self._writer, write)

    def give_up(self) -> None:
        """Stop waiting for a full disk or an unreachable server. From now on, these errors are raised to the
        callers.
        """
        self.room.give_up()
        self.server.give_up()

    async def close(self) -> None:
        """Finish counting trained rollouts, and close the store. If the disk is full or the server unreachable, the
        rest is counted at the next start.
        """
        self.give_up()
        try:
            await self.counted()
        except StorageError as error:
            if error.code not in (DISK_FULL, DATABASE_AWAY):
                raise
        finally:
            # Tasks may still write. A write after the store was closed would open a connection that nothing closes.
            for thread in (self._reader, self._writer):
                await asyncio.to_thread(thread.shutdown)
            await asyncio.to_thread(self.store.close)

    async def counted(self) -> None:
        """Wait until the totals contain the rollouts of all steps trained so far. Raises StorageError if counting
        failed.
        """
        if self._counting is not None:
            await asyncio.shield(self._counting)

    async def _count(self) -> None:
        loop = asyncio.get_running_loop()
        while self.store.is_uncounted:
            began_at = loop.time()
            await self.on_writer(self.store.count_trained)
            await asyncio.sleep(OTHERS_SHARE * (loop.time() - began_at))

    def _apply(
        self, records: Sequence[Record], now: float, events: Sequence[RunEvent], ahead: Sequence[ReadAhead]
    ) -> dict[Query, tuple[Collection[Any], Any]]:
        """Commit the records, then run the queries. Runs on the writing thread."""
        self.store.apply(records, now, events)
        found = {}
        with contextlib.suppress(StorageError):  # `read` runs the query again, and then raises the error.
            for one in ahead:
                found[one.query] = one.keys, self.store.read(one.query, one.keys)
        return found

    async def apply(
        self,
        records: Sequence[Record],
        now: float,
        events: Sequence[RunEvent] = (),
        *,
        ahead: Sequence[ReadAhead] = (),
    ) -> None:
        """Commit the records. `ahead`: queries that `read` will run next, unless another commit comes before."""
        number = self._num_writes + 1
        found = await self.on_writer(self._apply, records, now, events, ahead)
        if number == self._num_writes:  # Otherwise a later write may have changed the results.
            self._ahead = found
        if self._counting is not None and self._counting.done():
            counted, self._counting = self._counting, None
            counted.result()
        if self.store.is_uncounted and self._counting is None:
            self._counting = asyncio.create_task(self._count())
