"""Collect what a gateway's nodes send into batches, and store one batch at a time in JetStream, in order.

If too many bytes wait, the gateway stops reading from the nodes' sockets. If JetStream fails to store a batch, it is
stored again with the same message id, so that JetStream keeps only one copy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

from echo_hub.gateways.broker import Broker
from echo_hub.gateways.items import Item, ItemQueue
from echo_hub.gateways.sealing import Seal
from echo_shared.errors import ConnectError

log = logging.getLogger(__name__)

GATHER_S: Final = 0.02
"""Seconds for which items are collected into one message."""
STORED_BYTES: Final = 2**20
"""Size at which a batch is stored without further waiting, in bytes. A batch is larger only if it is a single, larger
item."""
WAITING_BYTES: Final = 2**24
RETRY_S: Final = 0.5


class GatewayUplink:
    def __init__(self, broker: Broker, seal: Seal, *, name: str) -> None:
        self._broker = broker
        self._seal = seal
        self._name = name
        self._items = ItemQueue()
        self._in_hand: list[Item] = []
        """Items of the batch that is being stored in JetStream."""
        self._number = 0
        self._there_are = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    async def put(self, item: Item, frame_bytes: int = 0) -> None:
        """Queue an item whose frame has this size. Waits while WAITING_BYTES or more are queued."""
        while self._items.num_bytes >= WAITING_BYTES:
            self._has_room.clear()
            await self._has_room.wait()
        self._items.put(item, frame_bytes)
        self._is_empty.clear()
        self._there_are.set()

    async def stored(self, subject: str) -> AsyncIterator[list[Item]]:
        """Store batches until cancelled. When JetStream has a batch on disk, yield its items, in the order of `put`.
        Called again, resume with the unfinished batch."""
        while True:
            if not self._in_hand:
                await self._there_are.wait()
                if self._items.num_bytes < STORED_BYTES:
                    await asyncio.sleep(GATHER_S)
                self._in_hand = self._take()
                self._number += 1
            message = self._seal.close(subject, [self._name, self._number, self._in_hand])
            await self._store(subject, message, f"{self._name}-{self._number}")
            items, self._in_hand = self._in_hand, []
            yield items
            if not self._items:
                self._is_empty.set()

    async def flushed(self) -> None:
        """Wait until all queued items are stored."""
        await self._is_empty.wait()

    def _take(self) -> list[Item]:
        taken = self._items.take(STORED_BYTES)
        if not self._items:
            self._there_are.clear()
        if self._items.num_bytes < WAITING_BYTES:
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
