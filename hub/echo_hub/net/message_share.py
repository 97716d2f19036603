"""Limit how long node messages may keep the event loop busy without a pause.

Handling a message that is already in memory never yields. A burst from one node would therefore block all others.
"""

from __future__ import annotations

import asyncio
from typing import Final

ROUND_S: Final = 0.01
"""Seconds per turn of the event loop for handling the messages of all nodes together. Every connection may handle one
message per turn, even beyond this budget."""


class MessageShare:
    """The time budget of one event loop; all connections of the loop share one instance."""

    def __init__(self) -> None:
        self._is_round = False
        self._ends_at = 0.0

    async def rest(self) -> None:
        """Call after each message. Once all nodes' messages have taken ROUND_S of this turn of the event loop, let
        other work run first."""
        loop = asyncio.get_running_loop()
        if not self._is_round:
            self._is_round, self._ends_at = True, loop.time() + ROUND_S
            loop.call_soon(self._end_round)
        elif loop.time() >= self._ends_at:
            await asyncio.sleep(0)

    def _end_round(self) -> None:
        self._is_round = False
