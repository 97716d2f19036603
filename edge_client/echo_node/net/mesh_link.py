"""One proven connection to another node, and the cap on what this node sends to all of them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed

from echo_shared.rate_cap import RateCap
from echo_shared.sockets import keep_unsent_short

log = logging.getLogger(__name__)

MOST_QUEUED_BYTES: Final = 4 * 2**20
"""For one link. The hub bounds what is under way; what does not fit all the same is not sent, and the hub sends it."""
UNSENT_BYTES: Final = 64 * 1024
"""That the system has taken for one link."""


class UploadCap:
    """Caps what is sent over all links, in bytes a second, and counts it; 0 = no cap."""

    def __init__(self, bytes_per_s: int, count: Callable[[int], None] = lambda count_bytes: None) -> None:
        self._cap = RateCap(bytes_per_s)
        self._count = count

    async def take(self, count_bytes: int) -> None:
        """Waits until so many bytes may go; first come, first served."""
        delay_s = self._cap.delay_s(count_bytes, asyncio.get_running_loop().time())
        if delay_s:
            await asyncio.sleep(delay_s)
        self._count(count_bytes)


@dataclass(eq=False, slots=True, kw_only=True)
class Link:
    """A connection to a node that has proven who it is.

    `write` sends what `put` has queued. Whoever reads `socket` ends the link.
    """

    node_id: str
    socket: Connection
    opened_here: bool
    """This node has connected to the other; else the other way round."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _queue: deque[bytes] = field(default_factory=deque)
    _queued_bytes: int = 0
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, frame: bytes) -> bool:
        """Queues a frame; False when the queue is full."""
        if self._queued_bytes + len(frame) > MOST_QUEUED_BYTES:
            return False
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        self._more.set()
        return True

    async def write(self, cap: UploadCap) -> None:
        """Sends what is queued until the connection is closed.

        A peer that takes nothing answers no ping either, and that closes it.
        """
        try:
            keep_unsent_short(self.socket.transport, UNSENT_BYTES)
            while await self._more.wait():
                while self._queue:
                    frame = self._queue.popleft()
                    await cap.take(len(frame))
                    await self.socket.send(frame)
                    self._queued_bytes -= len(frame)
                self._more.clear()
        except ConnectionClosed:
            return  # The reader hears of it too.
        except Exception:
            log.exception("Nothing more can be sent to the node %s.", self.node_id)
            self.abort()

    def abort(self) -> None:
        self.socket.transport.abort()
