"""One proven connection to another node, and the cap on what this node sends to all of them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed

from echo_shared.sockets import keep_unsent_short

log = logging.getLogger(__name__)

MOST_QUEUED_BYTES: Final = 4 * 2**20
"""For one link. The hub bounds what is under way; what does not fit all the same is not sent, and the hub sends it."""
UNSENT_BYTES: Final = 64 * 1024
"""That the system has taken for one link."""
_BURST_S: Final = 0.1


class UploadCap:
    """Caps what is sent over all links, in bytes a second; 0 = no cap."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._paid_until = 0.0

    async def take(self, count_bytes: int) -> None:
        """Waits until so many bytes may go; first come, first served."""
        if self._bytes_per_s:
            now = asyncio.get_running_loop().time()
            self._paid_until = max(self._paid_until, now - _BURST_S) + count_bytes / self._bytes_per_s
            if self._paid_until > now:
                await asyncio.sleep(self._paid_until - now)


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
