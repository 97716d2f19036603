"""A hub that tells nodes on this machine the addresses of their ports, and forwards their Meet messages."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from echo_node.host.address import HubAddress
from echo_shared.wire.messages import FromNode, Meet, MeetWanted

PATH: Final = "/sighting/key"


@dataclass
class FakeHub:
    """Answers requests of any path: with the connection's address, or with `answer` if set. `pause_s`: seconds before
    each answer.
    """

    answer: bytes | None = None
    pause_s: float = 0.0
    url: str = ""
    requests: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            host, port = writer.get_extra_info("peername")[:2]
            said = f"{host} {port} 0 signed".encode()
            await asyncio.sleep(self.pause_s)
            writer.write(self.answer or b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said))
            await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def opened(hub: FakeHub, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeHub]:
    server = await asyncio.start_server(hub.serve, "127.0.0.1", 0, ssl=tls)
    hub.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield hub
    finally:
        server.close()


class Line:
    """One node's connection to the hub. The hub forwards each MeetWanted to `peer` without checks."""

    def __init__(self, hub: FakeHub, node_id: str) -> None:
        self.address = HubAddress(origin=hub.url)
        self.said: list[MeetWanted] = []
        self.heard: asyncio.Queue[Meet] = asyncio.Queue()
        self.peer: Line | None = None
        self._node_id = node_id

    async def send(self, message: FromNode) -> None:
        assert isinstance(message, MeetWanted)
        self.said.append(message)
        seen = [said.split(" ") for said in message.sightings]
        addresses = tuple((host, int(port)) for host, port, *_ in seen)
        if self.peer is not None:
            await self.peer.heard.put(Meet(node_id=self._node_id, addresses=addresses, answers=message.answers))
