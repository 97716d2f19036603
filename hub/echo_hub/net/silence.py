"""Ends a wait in which nothing is heard for too long. A timeout of its own for each message would cost the loop a
timer each; here one looks now and then when something was heard last."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Silence:
    """Within it, `most_s` seconds between `listens` and `heard` end in TimeoutError. Of one task."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._since: float | None = None
        """By the loop's clock; None: nobody listens."""
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
        """From now on it counts."""
        self._since = asyncio.get_running_loop().time()

    def heard(self) -> None:
        """What is heard is worked on, however long."""
        self._since = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        ends_at = (loop.time() if self._since is None else self._since) + self._most_s
        if ends_at <= loop.time():
            self._limit.reschedule(loop.time())
        else:
            self._look_again = loop.call_at(ends_at, self._look)
