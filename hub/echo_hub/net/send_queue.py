"""What waits to be sent to one node: messages in their order, and pushes, which yield to every message. Of pushes,
those on which other nodes wait go first.

A push is made when its turn comes, so what has become useless meanwhile is not sent. That takes short queues further
on: bytes that the system has taken cannot be called back, nor overtaken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

MOST_MESSAGES: Final = 2_048
"""A node that leaves so many unread is stuck."""

MakePush = Callable[[], bytes | None]
"""Makes a push's frame; None: it is of no use any more."""


class SendQueue:
    """One task takes, all others put. Belongs to one event loop."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._relayed: deque[MakePush] = deque()
        self._pushes: deque[MakePush] = deque()
        self._more = asyncio.Event()

    def put(self, frame: bytes) -> bool:
        """Queues a message; False when the queue is full."""
        if len(self._messages) >= MOST_MESSAGES:
            return False
        self._messages.append(frame)
        self._more.set()
        return True

    def push(self, make: MakePush, *, relayed: bool) -> None:
        """Queues a push, which the node is to relay or not; whoever calls this bounds how many there are."""
        (self._relayed if relayed else self._pushes).append(make)
        self._more.set()

    async def next(self) -> bytes:
        """The frame to be sent next, as soon as there is one."""
        while True:
            if self._messages:
                return self._messages.popleft()
            if pushes := self._relayed or self._pushes:
                if (frame := pushes.popleft()()) is not None:
                    return frame
            else:
                self._more.clear()
                await self._more.wait()
