"""The web seed: serves published artefacts over plain HTTP with range requests, to nodes that no peer can serve.

The URL layout is BitTorrent's for web seeds with several files (https://www.bittorrent.org/beps/bep_0019.html), below
the node's passkey: the torrent's name, then the file's path in the torrent. Serves only files of published torrents,
only to joined nodes, never to barred nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from aiohttp import web

from echo_hub.net.client_address import client_ip
from echo_hub.net.publisher import WEB_SEED_PATH, Publisher
from echo_hub.net.tracker import Tracker
from echo_shared.errors import RefusedError, RemoteProtocolError

Vouch = Callable[[web.Request, str], None]
"""Attribute a request to a node; raises RefusedError when the node has too many connections already."""


def routes(
    publisher: Publisher, tracker: Tracker, vouch: Vouch | None = None, *, trusted_proxies: Collection[str] = ()
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
        if vouch is not None:
            try:
                vouch(request, node_id)
            except RefusedError as error:
                raise web.HTTPTooManyRequests(text=f"{error}\n") from error
        path = publisher.file(request.match_info["carrier"], request.match_info["path"])
        if path is None:
            raise web.HTTPNotFound(text="No published carrier has this file.\n")
        return web.FileResponse(path)

    return [web.get(WEB_SEED_PATH + "{passkey}/{carrier}/{path:.+}", answer)]
