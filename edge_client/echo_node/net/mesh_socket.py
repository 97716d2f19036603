"""Both ends of a connection between nodes, as the websockets library makes them, with their small frames counted: it
answers pings and keeps fragments before anybody has proven anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import ServerConnection

from echo_shared.frame_gate import FrameGate

log = logging.getLogger(__name__)


class Counted(Connection):
    """Ends by itself once its other end has sent too many small frames."""

    gate: FrameGate
    is_flooded = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.gate = FrameGate(now=self.loop.time(), after_head=True)

    def data_received(self, data: bytes) -> None:
        if self.is_flooded:
            return
        if self.gate.admits(data, now=self.loop.time()):
            super().data_received(data)
        else:
            self.is_flooded = True
            log.debug("A connection between nodes is cut: too many small frames.")
            self.transport.abort()


class Outgoing(Counted, ClientConnection):
    """Made to another node."""


class Incoming(Counted, ServerConnection):
    """Tells `admit` of itself as soon as it can be aborted."""

    def __init__(self, admit: Callable[[Connection], None], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._admit = admit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._admit(self)
