"""Writes rollouts and receipts to the spool (the node's database on disk) on a thread, so that the event loop never
waits for the disk. One transaction takes all writes that are queued; a write that the disk refuses is retried.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from echo_node.core.effects import SpoolEffect, SpoolRollout
from echo_node.core.events import Incoming, Spooled, SpoolFailed
from echo_node.host.spool import Spool
from echo_node.host.trouble_log import TroubleLog
from echo_shared.errors import StorageError

log = logging.getLogger(__name__)

RETRY_S: Final = 5.0
_PART: Final = "the spool"
_COUNTS: Final = "the spool's counts"


class SpoolWriter:
    """Queues spool effects, and writes them in batches.

    `put` never waits. The node's leases bound the queue, because the node takes no new leases while writes fail.
    """

    def __init__(self, spool: Spool, inbox: asyncio.Queue[Incoming], troubles: TroubleLog) -> None:
        self._spool = spool
        self._inbox = inbox
        self._troubles = troubles
        self._fails = False
        self._pending: list[SpoolEffect] = []
        self._news = asyncio.Event()
        self._retry = asyncio.Event()
        self._dirty = True
        self.counts: dict[str, int] = {}
        """Number of rollouts by state, as of the last `refresh`."""

    def put(self, effect: SpoolEffect) -> None:
        """Queue an effect. Effects are written in order."""
        self._pending.append(effect)
        self._news.set()

    def retry_now(self) -> None:
        self._retry.set()

    async def run(self) -> None:
        """Write until cancelled. Sends Spooled once rollouts are durable, and SpoolFailed after each failed attempt."""
        while True:
            await self._news.wait()
            self._news.clear()
            batch = tuple(self._pending)
            try:
                await asyncio.to_thread(self._spool.write, batch)
            except StorageError as error:
                self._troubles.met(_PART, error)
                self._fails = True
                await self._inbox.put(SpoolFailed(what=error.what))
                await self._wait_for_retry()
                self._news.set()
                continue
            del self._pending[: len(batch)]
            self._dirty = True
            rollouts = tuple(effect.rollout for effect in batch if isinstance(effect, SpoolRollout))
            self._troubles.end(_PART)
            if rollouts or self._fails:
                self._fails = False
                await self._inbox.put(Spooled(rollouts=rollouts))

    async def refresh(self) -> None:
        """Count the stored rollouts again if any were written since the last count."""
        if self._dirty:
            try:
                self.counts = await asyncio.to_thread(self._spool.counts)
            except StorageError as error:
                self._troubles.met(_COUNTS, error)
                return
            self._troubles.end(_COUNTS)
            self._dirty = False

    def finish(self) -> None:
        """Write the queue once more, after `run` was cancelled. Rollouts that cannot be written are returned to the hub
        at the node's next start.
        """
        try:
            self._spool.write(self._pending)
        except StorageError as error:
            log.error("%s", error)
        self._pending.clear()
        self._dirty = True

    async def _wait_for_retry(self) -> None:
        self._retry.clear()
        try:
            async with asyncio.timeout(RETRY_S):
                await self._retry.wait()
        except TimeoutError:
            return
