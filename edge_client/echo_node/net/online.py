"""When a node may use its network: what runs under it is stopped where it may not, and begun again later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Online:
    """On until `turn` says otherwise."""

    def __init__(self) -> None:
        self._on, self._off = asyncio.Event(), asyncio.Event()
        self._on.set()

    @property
    def is_on(self) -> bool:
        return self._on.is_set()

    def turn(self, *, on: bool) -> None:
        """Harmless where it is so already."""
        (self._on if on else self._off).set()
        (self._off if on else self._on).clear()

    async def wait(self) -> None:
        """Until it is on."""
        await self._on.wait()

    async def run(self, job: Callable[[], Awaitable[T]]) -> T:
        """What `job` returns or raises, which is cancelled when the network goes, and called again when it is back."""
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
