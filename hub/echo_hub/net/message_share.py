"""How long nodes' messages may keep the event loop at a stretch: what is read already is handled without a pause else,
and a burst of one node's would hold up all others."""

from __future__ import annotations

import asyncio
from typing import Final

ROUND_S: Final = 0.01
"""Of one round of the loop, for the messages of all nodes together; each connection has one message in any case."""


class MessageShare:
    """One for all connections of an event loop."""

    def __init__(self) -> None:
        self._is_round = False
        self._ends_at = 0.0

    async def rest(self) -> None:
        """Call after each message: waits for the loop's next round once this one's share is used up."""
        loop = asyncio.get_running_loop()
        if not self._is_round:
            self._is_round, self._ends_at = True, loop.time() + ROUND_S
            loop.call_soon(self._end_round)
        elif loop.time() >= self._ends_at:
            await asyncio.sleep(0)

    def _end_round(self) -> None:
        self._is_round = False
