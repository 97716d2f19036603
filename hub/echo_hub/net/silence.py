"""Time out a task that waits too long for a message.

One timer checks the time of the last message: a separate timeout per message would cost the event loop one timer each.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Silence:
    """Context manager for one task. Raises TimeoutError if more than `most_s` seconds pass from `listens` to
    `heard`."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._since: float | None = None
        """Loop time at which the current wait began; None while the task is not waiting for a message."""
        self._limit = asyncio.timeout(None)
        self._look_again: asyncio.TimerHandle

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._look_again.cancel()
        await self._limit.__aexit__(kind, error, at)

    def listens(self) -> None:
        """Start the countdown: the task now waits for a message."""
        self._since = asyncio.get_running_loop().time()

    def heard(self) -> None:
        """Stop the countdown: a message arrived. Handling it may take any time."""
        self._since = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        ends_at = (loop.time() if self._since is None else self._since) + self._most_s
        if ends_at <= loop.time():
            self._limit.reschedule(loop.time())
        else:
            self._look_again = loop.call_at(ends_at, self._look)
