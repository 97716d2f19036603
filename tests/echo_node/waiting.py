"""Waiting for conditions that nothing announces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true. Raises TimeoutError if this takes too long."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
