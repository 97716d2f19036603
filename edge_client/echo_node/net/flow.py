"""What goes over the hub's connection and to and from other nodes: counted, and what comes is capped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from echo_shared.rate_cap import RateCap

SMALL_BYTES: Final = 4_096
"""What is no larger counts, and is waited for by nobody: leases, receipts, news."""


def _uncounted(sent: int, received: int) -> None:
    """For who keeps no count."""


class Flow:
    """`count(sent, received)` is told of all bytes."""

    def __init__(self, download_bytes_s: int = 0, count: Callable[[int, int], None] = _uncounted) -> None:
        """`download_bytes_s`: 0 = no cap."""
        self.download_bytes_s = download_bytes_s
        self._cap = RateCap(download_bytes_s)
        self._count = count

    def sent(self, count_bytes: int) -> None:
        """So much has gone."""
        self._count(count_bytes, 0)

    async def received(self, count_bytes: int) -> None:
        """So much has come. Returns when more may: whoever waits before it reads on has the sender wait."""
        self._count(0, count_bytes)
        delay_s = self._cap.delay_s(count_bytes, asyncio.get_running_loop().time())
        if delay_s and count_bytes > SMALL_BYTES:
            await asyncio.sleep(delay_s)
