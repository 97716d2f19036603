"""Traffic of the hub's connection and of other nodes: counted, with a cap on downloads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from echo_shared.wire.rate_cap import RateCap

SMALL_BYTES: Final = 4_096
"""Most bytes of a message that counts but does not wait for the cap: leases, receipts, news."""


def _uncounted(sent: int, received: int) -> None:
    """Ignore the count."""


class Flow:
    """Counter and cap of traffic. `count(sent, received)` gets all bytes."""

    def __init__(self, download_bytes_s: int = 0, count: Callable[[int, int], None] = _uncounted) -> None:
        """`download_bytes_s`: 0 = no cap."""
        self.download_bytes_s = download_bytes_s
        self._cap = RateCap(download_bytes_s)
        self._count = count

    def sent(self, count_bytes: int) -> None:
        """Count sent bytes."""
        self._count(count_bytes, 0)

    async def received(self, count_bytes: int) -> None:
        """Count received bytes, and wait until more may come. A reader that waits here slows its sender down."""
        self._count(0, count_bytes)
        delay_s = self._cap.delay_s(count_bytes, asyncio.get_running_loop().time())
        if delay_s and count_bytes > SMALL_BYTES:
            await asyncio.sleep(delay_s)
