"""What waits to be sent to one node: messages in their order, and pushes, which yield to every message.

A push is made when its turn comes, so what has become useless meanwhile is not sent. That takes short queues further
on: bytes that the system has taken cannot be called back, nor overtaken.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

MOST_MESSAGES: Final = 2_048
MOST_PUSHES: Final = 4_096
MOST_BYTES: Final = 32 * 2**20
"""Of messages. A node that leaves so much unread is stuck."""

MakePush = Callable[[], bytes | None]
"""Makes a push's frame; None: it is of no use any more."""

Rank = tuple[int, bool]
"""Of pushes the least goes first, and of those of one rank the oldest."""


class SendQueue:
    """One task takes, all others put. Belongs to one event loop."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._num_bytes = 0
        self._pushes: list[tuple[Rank, int, MakePush]] = []
        self._numbers = itertools.count()
        self._has_ended = False
        self._more = asyncio.Event()
        self._is_waited_for = False

    @property
    def is_idle(self) -> bool:
        """Nothing waits, and what was taken last is on its way."""
        return self._is_waited_for and not (self._messages or self._pushes or self._has_ended)

    def put(self, frame: bytes) -> bool:
        """Queues a message; False when the queue is full."""
        if len(self._messages) >= MOST_MESSAGES or self._num_bytes + len(frame) > MOST_BYTES:
            return False
        self._num_bytes += len(frame)
        self._messages.append(frame)
        self._more.set()
        return True

    def push(self, make: MakePush, rank: Rank) -> bool:
        """Queues a push; False when the queue is full."""
        if len(self._pushes) >= MOST_PUSHES:
            return False
        heappush(self._pushes, (rank, next(self._numbers), make))
        self._more.set()
        return True

    def end(self) -> None:
        """Nothing more is taken from it."""
        self._has_ended = True
        self._more.set()

    async def next(self) -> bytes | None:
        """The frame to be sent next, as soon as there is one; None once the queue has ended."""
        while not self._has_ended:
            if self._messages:
                message = self._messages.popleft()
                self._num_bytes -= len(message)
                return message
            if self._pushes:
                _, _, make = heappop(self._pushes)
                if (frame := make()) is not None:
                    return frame
            else:
                self._more.clear()
                self._is_waited_for = True
                try:
                    await self._more.wait()
                finally:
                    self._is_waited_for = False
        return None
