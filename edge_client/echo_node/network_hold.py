"""Keep a node off the network while a metered connection or a traffic cap pauses it.

Fetching and serving stop at once. The hub's connection stays until unsent results are delivered, for a limited time,
and is made again after the hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from echo_node.connections import Connections
from echo_node.host.clock import running_s

OWED_S: Final = 10.0
"""Seconds that a node stays connected at most to deliver unsent results."""
_LOOK_S: Final = 0.1


class NetworkHold:
    """Takes the node off the network and back. Call `look` after each event that may change `is_wanted`."""

    def __init__(
        self, connections: Connections, *, is_wanted: Callable[[], bool], owes_the_hub: Callable[[], bool]
    ) -> None:
        self._connections = connections
        self._is_wanted = is_wanted
        self._owes_the_hub = owes_the_hub
        self._hanging_up: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Stay offline from the start if a hold is wanted. Call this before the first connection."""
        if self._is_wanted():
            self._connections.set_online(False)
            await self._connections.hang_up()

    def look(self) -> None:
        """Go offline or online if the hold has changed."""
        is_wanted = self._is_wanted()
        if is_wanted != self._connections.bulk.is_on:
            return
        self._connections.set_online(not is_wanted)
        if is_wanted:
            self._hanging_up = asyncio.create_task(self._hang_up(), name="hanging up")

    async def _hang_up(self) -> None:
        deadline = running_s() + OWED_S
        while self._owes_the_hub() and running_s() < deadline:  # noqa: ASYNC110 - the work loop tells nobody.
            await asyncio.sleep(_LOOK_S)
        if self._is_wanted():
            await self._connections.hang_up()
