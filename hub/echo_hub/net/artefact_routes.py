"""The web seed: serves published artefacts (base model and policy versions) over plain HTTP with range requests, for
nodes that find no peer.

The URL layout is BitTorrent's for web seeds with several files (https://www.bittorrent.org/beps/bep_0019.html), below
the node's passkey: the torrent's name, then the file's path in the torrent. Only files of published torrents are
served, only to joined nodes, never to barred nodes.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Protocol

from aiohttp import web

from echo_hub.net.client_address import client_ip
from echo_hub.net.limits import ConnectionLimits
from echo_hub.net.publisher import WEB_SEED_PATH, Publisher
from echo_hub.net.tracker import Tracker
from echo_shared.errors import RefusedError, RemoteProtocolError


class Vouches(Protocol):
    """Counts a request's connection for the node that the request's passkey names. Implemented by `Vouching`."""

    def vouch(self, request: web.Request, node_id: str) -> None:
        """Count the request's connection for this node. Raises RefusedError if the node has too many connections."""


class KnownToHub(Protocol):
    """Tells which nodes have done useful work for the run. Implemented by `echo_hub.intake.connected`."""

    def knows(self, node_id: str) -> bool: ...


class Vouching:
    """Counts each node's connections that fetch artefacts, and refuses those above the limit per node."""

    def __init__(self, limits: ConnectionLimits, nodes: KnownToHub) -> None:
        self._limits = limits
        self._nodes = nodes

    def vouch(self, request: web.Request, node_id: str) -> None:
        self._limits.vouch(request, node_id, is_known=self._nodes.knows(node_id))


def routes(
    publisher: Publisher, tracker: Tracker, vouches: Vouches | None = None, *, trusted_proxies: Collection[str] = ()
) -> list[web.RouteDef]:
    """Return the routes for `GET` and `HEAD` of `/artefacts/{passkey}/{carrier}/{path}`.

    `client_ip` explains `trusted_proxies`.
    """

    async def answer(request: web.Request) -> web.FileResponse:
        try:
            ip = client_ip(request, trusted_proxies)
            node_id = tracker.user_of(request.match_info["passkey"], ip, now=time.monotonic())
        except RefusedError as error:
            raise web.HTTPForbidden(text=f"{error}\n") from error
        except RemoteProtocolError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        if vouches is not None:
            try:
                vouches.vouch(request, node_id)
            except RefusedError as error:
                raise web.HTTPTooManyRequests(text=f"{error}\n") from error
        path = publisher.file(request.match_info["carrier"], request.match_info["path"])
        if path is None:
            raise web.HTTPNotFound(text="No published carrier has this file.\n")
        return web.FileResponse(path)

    return [web.get(WEB_SEED_PATH + "{passkey}/{carrier}/{path:.+}", answer)]
