"""Waits for what nobody tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Raises TimeoutError when it does not come true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
