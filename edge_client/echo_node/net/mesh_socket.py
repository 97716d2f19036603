"""Both ends of a connection between nodes, with a limit on small frames. The websockets library would otherwise answer
pings and keep fragments without limit, even before the node has proven its identity.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import ServerConnection

from echo_shared.wire.frame_gate import FrameGate

log = logging.getLogger(__name__)


class Counted(Connection):
    """A connection that ends itself after too many small frames."""

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
    """A connection that this node opens to another node."""


class Incoming(Counted, ServerConnection):
    """A connection that another node opens. `admit` is called as soon as the connection can be aborted."""

    is_punched = False
    """True: the connection goes through both routers (`hole_punching`)."""

    def __init__(self, admit: Callable[[Connection], None], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._admit = admit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._admit(self)
