"""Keeps a node off the network while a metered connection or a traffic limit pauses it.

Fetching and serving stop at once. The hub's connection stays until unsent results are delivered, for a limited time,
and is opened again after the pause.
"""

from __future__ import annotations

import asyncio
from typing import Final

from echo_node.connections import NodeNetwork
from echo_node.current_run import CurrentRun
from echo_node.host.clock import running_s

OWED_S: Final = 10.0
"""Maximum seconds for which a node stays connected to deliver unsent results."""
_LOOK_S: Final = 0.1


class NetworkHold:
    def __init__(self, connections: NodeNetwork, run: CurrentRun) -> None:
        self._connections = connections
        self._run = run
        self._hanging_up: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Keep a node offline that starts during such a pause. Call this before the node's first connection."""
        self._connections.set_online(False)
        await self._connections.hang_up()

    def turn(self, *, online: bool) -> None:
        """Take the node offline or online. No effect if it already is."""
        if online == self._connections.bulk.is_on:
            return
        self._connections.set_online(online)
        if not online:
            self._hanging_up = asyncio.create_task(self._hang_up(), name="hanging up")

    async def _hang_up(self) -> None:
        deadline = running_s() + OWED_S
        while self._run.owes_the_hub and running_s() < deadline:  # noqa: ASYNC110 - the work loop tells nobody.
            await asyncio.sleep(_LOOK_S)
        if not self._connections.bulk.is_on:
            await self._connections.hang_up()
