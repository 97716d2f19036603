"""A websocket to the hub that shows the node's credentials to no other server.

The websockets library follows redirects, even to other servers. So its `connect` never gets the credentials: the
connection first compares its server with the hub's address, and only then adds the credentials.
"""

from __future__ import annotations

from websockets.asyncio.client import ClientConnection
from websockets.datastructures import HeadersLike
from websockets.http11 import USER_AGENT
from websockets.uri import WebSocketURI, parse_uri

from echo_node.host.address import HubAddress
from echo_shared.errors import ConnectError
from echo_shared.wire.credentials import Credentials
from echo_shared.wire.messages.fields import printable_line


def connection_to(address: HubAddress, credentials: Credentials) -> type[ClientConnection]:
    """Return the connection class for `connect`. A connection to another server raises ConnectError before it sends
    anything.
    """
    hub = parse_uri(address.websocket)

    class HubConnection(ClientConnection):
        async def handshake(
            self, additional_headers: HeadersLike | None = None, user_agent_header: str | None = USER_AGENT
        ) -> None:
            assert additional_headers is None, "connect() gets no headers, because it would send them to other servers"
            if _origin(self.protocol.uri) != _origin(hub):
                raise ConnectError(
                    "The hub's address leads to another server.",
                    got=f"{address.origin} redirects to {_shown(self.protocol.uri)}",
                    do="Ask the hub's operator for its address, and join that.",
                )
            await super().handshake({"Authorization": credentials.header()}, user_agent_header)

    return HubConnection


def _origin(server: WebSocketURI) -> tuple[bool, str, int]:
    return server.secure, server.host.lower(), server.port


def _shown(server: WebSocketURI) -> str:
    host = f"[{server.host}]" if ":" in server.host else server.host
    return printable_line(f"{'https' if server.secure else 'http'}://{host}:{server.port}")
