"""Waiting for conditions without a notification."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true; raise TimeoutError if it never is."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
