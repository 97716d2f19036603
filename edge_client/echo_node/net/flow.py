"""Traffic of the hub's connection and of other nodes: counted, with a limit on downloads."""

from __future__ import annotations

import asyncio
from typing import Final

from echo_node.host.traffic import TrafficMeter
from echo_shared.wire.rate_cap import RateCap

SMALL_BYTES: Final = 4_096
"""Messages up to this size, such as leases and receipts, count towards the limit but never wait."""


class Flow:
    def __init__(self, download_bytes_s: int = 0, meter: TrafficMeter | None = None) -> None:
        """`download_bytes_s`: limit in bytes per second, 0 = none. `meter` None: received bytes are not counted."""
        self.download_bytes_s = download_bytes_s
        self._cap = RateCap(download_bytes_s)
        self._meter = meter

    def sent(self, count_bytes: int) -> None:
        if self._meter is not None:
            self._meter.count(sent=count_bytes)

    async def received(self, count_bytes: int) -> None:
        """Count received bytes, and wait until more may come. A reader that waits here slows its sender down."""
        if self._meter is not None:
            self._meter.count(received=count_bytes)
        delay_s = self._cap.delay_s(count_bytes, asyncio.get_running_loop().time())
        if delay_s and count_bytes > SMALL_BYTES:
            await asyncio.sleep(delay_s)
