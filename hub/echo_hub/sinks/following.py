"""One writer's life beside a run: opened, fed from the store, closed. After a failure it is opened again.

A writer is TensorBoard's or Weights & Biases' own client. It runs on threads that the hub does not wait for, so it can
neither stop the run, nor block the event loop, nor hold up the hub's end for longer than `CLOSE_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from echo_hub.dashboard.source import Changes
from echo_hub.sinks.reading import Entry, Position, Reading
from echo_shared.abandonable import abandonable
from echo_shared.room import Room

log = logging.getLogger(__name__)

T = TypeVar("T")

WRITE_EVERY_S: Final = 2.0
"""Shortest time between two writes."""
SLOW_S: Final = 120.0
"""A call that takes longer is told to the operator."""
CLOSE_S: Final = 10.0
AGAIN_S: Final = 300.0
"""Time from a failure to the next opening."""
MOST_CHARACTERS: Final = 300
"""Length of an error text that the operator is shown."""


class Writer(Protocol):
    """Where the entries go. Each method blocks; no two are called at once. An error is the writer's, not the run's."""

    @property
    def name(self) -> str:
        """Name of the program, for people."""

    def open(self) -> Position:
        """Get ready. Return how far the entries have been written."""

    def write(self, entries: Sequence[Entry], position: Position) -> None:
        """Take over the entries, which end at `position`."""

    def close(self) -> None:
        """Write what is left, and release everything. Do nothing when not open."""


class Following:
    """Feeds one writer. `read` makes the reading of the entries after a position, from the database at `server`."""

    def __init__(self, writer: Writer, read: Callable[[Position], Reading], server: Room, changes: Changes) -> None:
        self._writer = writer
        self._read = read
        self._server = server
        self._changes = changes
        self.problem: str | None = None
        """Text for the operator while the writer fails, else None."""

    async def run(self) -> None:
        """Follow the store until cancelled."""
        while True:
            try:
                await self._follow()
            except Exception as error:
                # The writer is another project's software: any error must end this attempt alone.
                log.debug("%s failed", self._writer.name, exc_info=True)
                self._say(str(error) or repr(error))
            await asyncio.sleep(AGAIN_S)

    async def _follow(self) -> None:
        try:
            position = await self._call(self._writer.open)
            reading = await self._server.until_done(lambda: asyncio.to_thread(self._read, position))
            while True:
                seen = self._changes.number
                while entries := await self._server.until_done(lambda: asyncio.to_thread(reading.read)):
                    await self._call(self._writer.write, entries, reading.position)
                self._recovered()
                await self._changes.wait(seen)
                await asyncio.sleep(WRITE_EVERY_S)
        finally:
            await self._close()

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return what a method of the writer returns. A slow call is told, and waited for: the next one comes after."""
        call = asyncio.ensure_future(abandonable(function, *arguments))
        try:
            done, _ = await asyncio.wait([call], timeout=SLOW_S)
            if not done:
                self._say("it takes too long")
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
            f"{self._writer.name} gets no figures; the run goes on without it, and it is tried again by itself. "
            f"Look at its settings: {' '.join(what.split())[:MOST_CHARACTERS]}"
        )
        log.log(logging.WARNING if is_new else logging.DEBUG, "%s", self.problem)
        self._changes.notify()

    def _recovered(self) -> None:
        if self.problem is not None:
            self.problem = None
            log.info("%s gets the run's figures again.", self._writer.name)
            self._changes.notify()
