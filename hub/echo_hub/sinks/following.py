"""One sink's life beside a run: opened, fed from the store, closed; when it fails or hangs, said once and tried again.

Nothing of it stops the run, or holds up the hub's end for longer than `CLOSE_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from echo_hub.dashboard.source import Changes
from echo_hub.sinks.base import MetricSink, Position
from echo_hub.sinks.reading import Reading
from echo_shared.room import Room

log = logging.getLogger(__name__)

WRITE_EVERY_S: Final = 2.0
"""Writes at most this often."""
OPEN_S: Final = 120.0
WRITE_S: Final = 60.0
"""For what one read gives."""
CLOSE_S: Final = 10.0
AGAIN_S: Final = 300.0
"""From a failure until it is opened anew."""
MOST_CHARACTERS: Final = 300
"""Of what a sink says of its failure."""


class Following:
    """`read` makes the reading of what the sink has not got yet; a store whose `server` is away is waited for."""

    def __init__(self, sink: MetricSink, read: Callable[[Position], Reading], server: Room) -> None:
        self._sink = sink
        self._read = read
        self._server = server
        self.problem: str | None = None
        """What is wrong with it, for the operator; None: nothing, or not any more."""

    async def run(self, changes: Changes) -> None:
        """Follows the store for ever."""
        while True:
            try:
                await self._follow(changes)
            except Exception as error:
                # A sink is another project's software: whatever it raises is its own failure.
                log.debug("%s has failed", self._sink.name, exc_info=True)
                self._say(error)
                changes.notify()
            await asyncio.sleep(AGAIN_S)

    async def _follow(self, changes: Changes) -> None:
        try:
            async with asyncio.timeout(OPEN_S):
                position = await self._sink.open()
            reading = await self._server.until_done(lambda: asyncio.to_thread(self._read, position))
            while True:
                seen = changes.number
                while entries := await self._server.until_done(lambda: asyncio.to_thread(reading.read)):
                    async with asyncio.timeout(WRITE_S):
                        await self._sink.write(entries, reading.position)
                if self._recovered():
                    changes.notify()
                await changes.wait(seen)
                await asyncio.sleep(WRITE_EVERY_S)
        finally:
            await self._close()

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._sink.close()
        except Exception:
            # As above; what it fails of is told where it is fed.
            log.debug("%s was not closed", self._sink.name, exc_info=True)

    def _say(self, error: Exception) -> None:
        what = "it takes too long" if isinstance(error, TimeoutError) else str(error) or repr(error)
        is_new = self.problem is None
        self.problem = (
            f"{self._sink.name} gets no figures; the run goes on without it, and it is tried again by itself. Look at "
            f"its settings: {' '.join(what.split())[:MOST_CHARACTERS]}"
        )
        log.log(logging.WARNING if is_new else logging.DEBUG, "%s", self.problem)

    def _recovered(self) -> bool:
        """Whether there was a problem."""
        had, self.problem = self.problem is not None, None
        if had:
            log.info("%s gets the run's figures again.", self._sink.name)
        return had
