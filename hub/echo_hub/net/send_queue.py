"""The send queue of one node: messages in order, and pushes (pieces of artefacts), which yield to every message.

The frame of a push is built when the queue reaches it, so a push that has become useless is not sent. This works only
with short buffers in the transport and the kernel: bytes that the kernel has taken cannot be recalled or overtaken.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from heapq import heappop, heappush
from typing import Final, Protocol

from echo_shared.wire.messages import FromHub

MOST_MESSAGES: Final = 2_048
MOST_PUSHES: Final = 4_096
MOST_BYTES: Final = 32 * 2**20
"""Maximum number of bytes of queued messages. A node that leaves more than this unread is taken as stuck."""

Rank = tuple[int, bool]
"""Order of pushes: lower ranks go first, and among equal ranks the older push."""


class DeferredMessage(Protocol):
    """A low-priority message that is built when a queue reaches it."""

    def build(self) -> FromHub | None:
        """Return the message; None if it is no longer needed."""


class Push(Protocol):
    """A low-priority frame that is built when a queue reaches it."""

    def frame(self) -> bytes | None:
        """Return the frame; None if it is no longer useful."""


class SendQueue:
    """A queue with one consumer task and any number of producers, all in one event loop."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._num_bytes = 0
        self._pushes: list[tuple[Rank, int, Push]] = []
        self._numbers = itertools.count()
        self._has_ended = False
        self._more = asyncio.Event()
        self._is_waited_for = False

    @property
    def is_idle(self) -> bool:
        """True if the queue is empty and the frame taken last has been written."""
        return self._is_waited_for and not (self._messages or self._pushes or self._has_ended)

    def put(self, frame: bytes) -> bool:
        """Queue a message; return False if the queue is full."""
        if len(self._messages) >= MOST_MESSAGES or self._num_bytes + len(frame) > MOST_BYTES:
            return False
        self._num_bytes += len(frame)
        self._messages.append(frame)
        self._more.set()
        return True

    def push(self, push: Push, rank: Rank) -> bool:
        """Queue a push; return False if the queue is full."""
        if len(self._pushes) >= MOST_PUSHES:
            return False
        heappush(self._pushes, (rank, next(self._numbers), push))
        self._more.set()
        return True

    def end(self) -> None:
        """End the queue: `next` returns None from now on."""
        self._has_ended = True
        self._more.set()

    async def next(self) -> bytes | None:
        """Wait for the next frame to send and return it; None once the queue has ended."""
        while not self._has_ended:
            if self._messages:
                message = self._messages.popleft()
                self._num_bytes -= len(message)
                return message
            if self._pushes:
                _, _, push = heappop(self._pushes)
                if (frame := push.frame()) is not None:
                    return frame
            else:
                self._more.clear()
                self._is_waited_for = True
                try:
                    await self._more.wait()
                finally:
                    self._is_waited_for = False
        return None
