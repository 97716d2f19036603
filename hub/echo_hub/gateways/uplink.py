"""Batch what a gateway's nodes send, and store one batch at a time in JetStream, in order.

When too many bytes wait, the gateway stops reading from the nodes' sockets. A failed store is retried with the same
message id, so that JetStream keeps only one copy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from echo_hub.gateways.broker import Broker
from echo_hub.gateways.items import Item
from echo_hub.gateways.sealing import Seal
from echo_shared.errors import ConnectError

log = logging.getLogger(__name__)

GATHER_S: Final = 0.02
"""Seconds for which items are collected into one stored message."""
STORED_BYTES: Final = 2**20
"""Size at which a batch is stored without further waiting, in bytes; a batch is larger only if a single item is."""
WAITING_BYTES: Final = 2**24
RETRY_S: Final = 0.5
AROUND_BYTES: Final = 128
"""Estimated bytes that an item takes in addition to its frame."""


class GatewayUplink:
    """Stores what nodes send. `stored` is called with all items of a batch once JetStream has the batch on disk, in the
    order of `put`."""

    def __init__(self, broker: Broker, seal: Seal, *, name: str, stored: Callable[[Sequence[Item]], None]) -> None:
        self._broker = broker
        self._seal = seal
        self._name = name
        self._stored = stored
        self._items: list[tuple[Item, int]] = []
        self._in_hand: list[Item] = []
        """The batch being stored."""
        self._num_bytes = 0
        self._number = 0
        self._there_are = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    async def put(self, item: Item, num_bytes: int) -> None:
        """Queue an item. Waits while WAITING_BYTES or more are queued."""
        while self._num_bytes >= WAITING_BYTES:
            self._has_room.clear()
            await self._has_room.wait()
        self._items.append((item, num_bytes + AROUND_BYTES))
        self._num_bytes += num_bytes + AROUND_BYTES
        self._is_empty.clear()
        self._there_are.set()

    async def run(self, subject: str) -> None:
        """Store batches until cancelled. When called again after that, resume with the unfinished batch."""
        while True:
            if not self._in_hand:
                await self._there_are.wait()
                if self._num_bytes < STORED_BYTES:
                    await asyncio.sleep(GATHER_S)
                self._in_hand = self._take()
                self._number += 1
            message = self._seal.close(subject, [self._name, self._number, self._in_hand])
            await self._store(subject, message, f"{self._name}-{self._number}")
            items, self._in_hand = self._in_hand, []
            self._stored(items)
            if not self._items:
                self._is_empty.set()

    async def flushed(self) -> None:
        """Wait until the queue is empty."""
        await self._is_empty.wait()

    def _take(self) -> list[Item]:
        taken, size = list[Item](), 0
        for item, num_bytes in self._items:
            if taken and size + num_bytes > STORED_BYTES:
                break
            taken.append(item)
            size += num_bytes
        del self._items[: len(taken)]
        self._num_bytes -= size
        if not self._items:
            self._there_are.clear()
        if self._num_bytes < WAITING_BYTES:
            self._has_room.set()
        return taken

    async def _store(self, subject: str, message: bytes, message_id: str) -> None:
        is_said = False
        while True:
            try:
                await self._broker.store(subject, message, message_id=message_id)
            except ConnectError as error:
                if not is_said:
                    log.warning("messages from nodes wait because JetStream does not store them: %s", error.brief)
                    is_said = True
                await asyncio.sleep(RETRY_S)
            else:
                if is_said:
                    log.warning("JetStream stores messages from nodes again")
                return
