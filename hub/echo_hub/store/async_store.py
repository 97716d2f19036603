"""The store for the event loop: it writes on one thread and reads on another.

SQLite has one writer, so writes are committed in the order of their calls. A write that a full disk refuses waits, and
all later writes wait behind it. Reads run next to writes, and see what was committed when they began.

While a database server is away, reads and writes wait. Each write is done once, even if the answer to its commit was
lost. Pages and curves read `store` directly on their own threads, and wait for nothing.

The rollouts of a large trained step are counted in parts, with other writes in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Concatenate, Final, ParamSpec, TypeVar

from sqlalchemy import Connection

from echo_hub.core.effects import Record
from echo_hub.store.lost_commits import finding_out
from echo_hub.store.store import Store
from echo_shared.books import RunEvent
from echo_shared.errors import DATABASE_AWAY, DISK_FULL, StorageError
from echo_shared.room import Room

OTHERS_SHARE: Final = 2.0
"""While a large step is counted: how long others have the writer and the interpreter after each part, by its time."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class AsyncStore:
    """`read` and `write` do what the store's methods of these names do, and raise what these raise. `room` waits for a
    full disk, `server` for a database server that is away."""

    def __init__(self, store: Store, room: Room | None = None, server: Room | None = None) -> None:
        self.store = store
        self.room = room or Room()
        self.server = server or Room(code=DATABASE_AWAY)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        self._counting: asyncio.Task[None] | None = None

    async def read(self, query: Callable[Concatenate[Connection, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return what `query` finds in the state of one commit."""
        read = partial(self.server.until, lambda: self.store.read(query, *args, **kwargs))
        return await asyncio.get_running_loop().run_in_executor(self._reader, read)

    async def read_counted(
        self, query: Callable[Concatenate[Connection, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Return what `query` finds once all rollouts that are trained by now are counted."""
        await self.counted()
        return await self.read(query, *args, **kwargs)

    async def write(
        self, command: Callable[Concatenate[Connection, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Carry out `command` in one transaction."""
        return await self.on_writer(partial(self.store.write, command, *args, **kwargs))

    async def on_writer(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a method of the store that writes."""

        def write() -> _T:
            with finding_out(self.server):
                return self.room.until(lambda: self.server.until(lambda: method(*args, **kwargs)))

        return await asyncio.get_running_loop().run_in_executor(self._writer, write)

    def give_up(self) -> None:
        """Nobody waits any more for a disk or a server: what they do not take is raised."""
        self.room.give_up()
        self.server.give_up()

    async def close(self) -> None:
        """What a full disk, or a server that is away, does not let be counted is left to the next start."""
        self.give_up()
        try:
            await self.counted()
        except StorageError as error:
            if error.code not in (DISK_FULL, DATABASE_AWAY):
                raise
        finally:
            await asyncio.to_thread(self._reader.shutdown)
            await self.on_writer(self.store.close)
            self._writer.shutdown()

    async def counted(self) -> None:
        """Returns when all rollouts of what is trained by now are counted. Raises StorageError when that failed."""
        if self._counting is not None:
            await asyncio.shield(self._counting)

    async def _count(self) -> None:
        loop = asyncio.get_running_loop()
        while self.store.is_uncounted:
            began_at = loop.time()
            await self.on_writer(self.store.count_trained)
            await asyncio.sleep(OTHERS_SHARE * (loop.time() - began_at))

    async def apply(self, records: Sequence[Record], now: float, events: Sequence[RunEvent] = ()) -> None:
        await self.on_writer(self.store.apply, records, now, events)
        if self._counting is not None and self._counting.done():
            counted, self._counting = self._counting, None
            counted.result()
        if self.store.is_uncounted and self._counting is None:
            self._counting = asyncio.create_task(self._count())
