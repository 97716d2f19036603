"""What a gateway's nodes send, on its way to JetStream's disk: gathered, in order, and one message at a time.

A node's next message waits while too much does, down to its socket. What is not stored is tried again until it is, by
the same id, so that JetStream has it once however often it was sent.
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
"""What a message costs the hub, it costs once for all that came in this time."""
STORED_BYTES: Final = 2**20
"""Of one stored message: with so much nothing more is gathered."""
WAITING_BYTES: Final = 2**24
RETRY_S: Final = 0.5
AROUND_BYTES: Final = 128
"""Of an item, beside its frame."""


class Uplink:
    """`stored` is told of all items of a message that JetStream has on disk, in the order in which they were put."""

    def __init__(self, broker: Broker, seal: Seal, *, name: str, stored: Callable[[Sequence[Item]], None]) -> None:
        self._broker = broker
        self._seal = seal
        self._name = name
        self._stored = stored
        self._items: list[tuple[Item, int]] = []
        self._in_hand: list[Item] = []
        """What is being stored."""
        self._num_bytes = 0
        self._number = 0
        self._there_are = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    async def put(self, item: Item, num_bytes: int) -> None:
        """Waits while there is too much."""
        while self._num_bytes >= WAITING_BYTES:
            self._has_room.clear()
            await self._has_room.wait()
        self._items.append((item, num_bytes + AROUND_BYTES))
        self._num_bytes += num_bytes + AROUND_BYTES
        self._is_empty.clear()
        self._there_are.set()

    async def run(self, subject: str) -> None:
        """Stores for ever; begun again after it was cancelled, it goes on with what it had in hand."""
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
        """Until nothing waits."""
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
                    log.warning("what nodes send waits: %s", error.brief)
                    is_said = True
                await asyncio.sleep(RETRY_S)
            else:
                if is_said:
                    log.warning("what nodes send is stored again")
                return
