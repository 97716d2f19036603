"""Keeps a node off its network while what holds it back is the network itself: it costs, or a cap is reached.

Fetching and serving stop at once. The hub's line stays until what was drawn is delivered, for a while at most, and is
made anew when the hold is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from echo_node.connections import Connections
from echo_node.host.clock import running_s

OWED_S: Final = 10.0
"""For the hub to take what it is owed."""
_LOOK_S: Final = 0.1


class NetworkHold:
    """`look` after everything that may change what `is_wanted` says."""

    def __init__(
        self, connections: Connections, *, is_wanted: Callable[[], bool], owes_the_hub: Callable[[], bool]
    ) -> None:
        self._connections = connections
        self._is_wanted = is_wanted
        self._owes_the_hub = owes_the_hub
        self._hanging_up: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Before the first connection: none is made where the network is not to be used."""
        if self._is_wanted():
            self._connections.set_online(False)
            await self._connections.hang_up()

    def look(self) -> None:
        """Goes offline, or back."""
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
