"""Sightings: the hub's signed statements about the public address of a node's local port.

A node behind a router lacks knowledge of its public address. It connects to the hub from a local port, and the hub
answers with the address and the port from which the connection came. The node passes the answer on in a MeetWanted. The
hub keeps nothing in between: the signature shows that the statement is its own.

A TCP connection proves that packets to that address arrive at the node. A sighting thus never names the address of a
foreign machine, and the answer amplifies no traffic.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Collection
from typing import Final

from aiohttp import web

from echo_hub.net.address_rate import AddressRate
from echo_hub.net.artefact_routes import Vouches
from echo_hub.net.client_address import client_ip
from echo_hub.net.tracker import Tracker
from echo_shared.errors import RefusedError, RemoteProtocolError
from echo_shared.signing.identity import Identity

SIGHTING_PATH: Final = "/sighting/"
VALID_S: Final = 60
"""Seconds for which a sighting is valid. Routers keep the port of an open connection at least this long."""
UNKNOWN_PORT: Final = 0
"""Port of a connection through a proxy, which names only the client's address."""
PER_S: Final = 2_000.0
"""Maximum number of sightings per second that the hub makes for all nodes together."""
PER_S_OF_NODE: Final = 32.0
"""Maximum number of sightings per second that the hub makes for one node: two address families for each of its
Meets."""
_MAC_BYTES: Final = 16


class Sightings:
    """Signs and checks sightings. `now`: seconds since the epoch."""

    def __init__(self, hub: Identity) -> None:
        # Ed25519 signatures are deterministic, so this secret survives a restart without being stored.
        self._secret = hashlib.blake2b(hub.sign(b"echo sightings"), digest_size=32).digest()

    def sign(self, node_id: str, host: str, port: int, *, now: float) -> str:
        said = f"{host} {port} {int(now) + VALID_S}"
        return f"{said} {self._mac(node_id, said)}"

    def read(self, node_id: str, sighting: str, *, now: float) -> tuple[str, int]:
        """Return the address and port in a sighting of this node. Raises RemoteProtocolError if the sighting is
        invalid or too old.
        """
        said, _, mac = sighting.rpartition(" ")
        if not hmac.compare_digest(mac.encode(errors="replace"), self._mac(node_id, said).encode()):
            raise RemoteProtocolError("This is not a sighting of this node by this hub.", got=repr(sighting))
        host, port, until = said.split(" ")
        if now > int(until):
            raise RemoteProtocolError("A node's sighting is too old.", got=f"{now - int(until):.0f} s too old")
        return host, int(port)

    def _mac(self, node_id: str, said: str) -> str:
        content = f"{node_id} {said}".encode(errors="replace")
        return hashlib.blake2b(content, key=self._secret, digest_size=_MAC_BYTES).hexdigest()


def routes(
    sightings: Sightings, tracker: Tracker, vouches: Vouches | None = None, *, trusted_proxies: Collection[str] = ()
) -> list[web.AbstractRouteDef]:
    """Return the route `GET /sighting/{passkey}`, for nodes that have joined. `client_ip` explains `trusted_proxies`.
    The general request limits skip nodes' requests, so the route has a separate limit.
    """
    rate = AddressRate(in_all=PER_S, of_one=PER_S_OF_NODE, now=time.monotonic())

    async def answer(request: web.Request) -> web.Response:
        try:
            ip = client_ip(request, trusted_proxies)
            now = time.monotonic()
            node_id = tracker.user_of(request.match_info["passkey"], ip, now=now)
            if not rate.take(node_id, now=now):
                raise web.HTTPTooManyRequests(text="This node asks for too many sightings.\n")
            if vouches is not None:
                vouches.vouch(request, node_id)
        except RefusedError as error:
            raise web.HTTPForbidden(text=f"{error}\n") from error
        except RemoteProtocolError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        peer = None if request.transport is None else request.transport.get_extra_info("peername")
        port = UNKNOWN_PORT if peer is None or request.remote in trusted_proxies else peer[1]
        return web.Response(text=sightings.sign(node_id, ip, port, now=time.time()))

    return [web.get(SIGHTING_PATH + "{passkey}", answer, allow_head=False)]
