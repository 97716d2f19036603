"""Switch for network use. Switching it off cancels jobs that use the network; when it is on again, they restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Online:
    """A switch for network use. It is on at first."""

    def __init__(self) -> None:
        self._on, self._off = asyncio.Event(), asyncio.Event()
        self._on.set()

    @property
    def is_on(self) -> bool:
        return self._on.is_set()

    def turn(self, *, on: bool) -> None:
        (self._on if on else self._off).set()
        (self._off if on else self._on).clear()

    async def wait(self) -> None:
        await self._on.wait()

    async def run(self, job: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `job`. Switching off cancels the job; switching on calls it again."""
        while True:
            await self.wait()
            task, gone = asyncio.ensure_future(job()), asyncio.ensure_future(self._off.wait())
            try:
                await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                task.cancel()
                await asyncio.wait({task, gone})
            if not task.cancelled():
                return task.result()
