"""Accept each request once: a duplicate waits for the first copy, and a request whose connection closes is still
accepted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Identities:
    """One lock for each request that is being accepted, by (owner, seq_id)."""

    def __init__(self) -> None:
        self._locks: dict[tuple[str, int], tuple[asyncio.Lock, int]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def only(self, owner_id: str, seq_id: int) -> AsyncIterator[None]:
        """Hold the lock of this request: one task at a time may accept it."""
        key = (owner_id, seq_id)
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[key]
            if users == 1:
                del self._locks[key]
            else:
                self._locks[key] = (lock, users - 1)

    async def finished(self, work: Coroutine[Any, Any, T]) -> T:
        """Finish the coroutine even if the caller is cancelled: a request whose row is already committed must not stay
        half accepted."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for all coroutines that still run for cancelled callers."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # The caller has the exception, or is gone.
