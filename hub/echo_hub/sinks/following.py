"""Open one writer, feed it from the database, and close it. After a failure, open it again.

A writer is the client library of TensorBoard or of Weights & Biases. It runs on threads that the hub does not wait for.
So a writer cannot stop the run or block the event loop, and delays the hub's end by at most `CLOSE_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Final, Protocol, TypeVar

from echo_hub.dashboard.source import Changes
from echo_hub.sinks.reading import Entry, EntryReader, Position
from echo_hub.sinks.texts import SampleTexts
from echo_hub.store.store import Store
from echo_shared.files.full_disk import Room
from echo_shared.process.abandonable import abandonable

log = logging.getLogger(__name__)

T = TypeVar("T")

WRITE_EVERY_S: Final = 2.0
"""Shortest time in seconds between two calls of `EntryWriter.write`."""
SLOW_S: Final = 120.0
"""If a call takes longer than this many seconds, the operator is told that the writer is slow."""
CLOSE_S: Final = 10.0
AGAIN_S: Final = 300.0
"""Delay in seconds between a writer's failure and its next opening."""
MOST_CHARACTERS: Final = 300
"""Number of characters of an error text that the operator sees."""


class EntryWriter(Protocol):
    """A program that gets the entries, such as TensorBoard.

    Each method blocks, and only one is called at a time. Errors of the methods do not affect the run.
    """

    @property
    def name(self) -> str:
        """Name of the program that gets the entries, for texts to the operator."""

    def open(self) -> Position:
        """Prepare for writing. Return the position up to which the entries are already written."""

    def write(self, entries: Sequence[Entry], position: Position) -> None:
        """Write the entries. `position` is the position after the last one."""

    def close(self) -> None:
        """Write the remaining entries and release all resources. Does nothing if the writer is not open."""


class Following:
    """Feeds one writer from the database. It waits while the database server is unreachable."""

    def __init__(
        self, writer: EntryWriter, store: Store, server: Room, changes: Changes, *, texts: SampleTexts | None = None
    ) -> None:
        self._writer = writer
        self._store = store
        self._texts = texts
        self._server = server
        self._changes = changes
        self.problem: str | None = None
        """Text for the operator while the writer fails or is slow. Otherwise None."""

    async def run(self) -> None:
        """Feed the writer with all new entries, until cancelled."""
        while True:
            try:
                await self._follow()
            except Exception as error:
                # The writer is a foreign library and may raise any error. An error ends only this attempt.
                log.debug("%s failed", self._writer.name, exc_info=True)
                self._say(str(error) or repr(error))
            await asyncio.sleep(AGAIN_S)

    async def _follow(self) -> None:
        try:
            position = await self._call(abandonable(self._writer.open))
            reading = await self._server.until_done(
                lambda: asyncio.to_thread(EntryReader, self._store, position, texts=self._texts)
            )
            while True:
                seen = self._changes.number
                while entries := await self._server.until_done(lambda: asyncio.to_thread(reading.read)):
                    await self._call(abandonable(self._writer.write, entries, reading.position))
                self._recovered()
                await self._changes.wait(seen)
                await asyncio.sleep(WRITE_EVERY_S)
        finally:
            await self._close()

    async def _call(self, work: Awaitable[T]) -> T:
        """Return the result of a call of the writer. A slow call is reported, and the next call still waits until the
        slow call ends."""
        call = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait([call], timeout=SLOW_S)
            if not done:
                self._say("a call takes too long")
            return await call
        finally:
            call.cancel()

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await abandonable(self._writer.close)
        except Exception:
            log.debug("%s was not closed", self._writer.name, exc_info=True)

    def _say(self, what: str) -> None:
        is_new = self.problem is None
        self.problem = (
            f"{self._writer.name} gets no figures; the run continues without it, and the hub retries by itself. "
            f"Check its settings: {' '.join(what.split())[:MOST_CHARACTERS]}"
        )
        log.log(logging.WARNING if is_new else logging.DEBUG, "%s", self.problem)
        self._changes.notify()

    def _recovered(self) -> None:
        if self.problem is not None:
            self.problem = None
            log.info("%s gets the run's figures again.", self._writer.name)
            self._changes.notify()
