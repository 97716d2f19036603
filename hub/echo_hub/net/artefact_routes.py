"""The web seed: published artefacts over plain HTTP with range requests, for nodes that no peer can serve.

The address is BitTorrent's for a web seed of several files (https://www.bittorrent.org/beps/bep_0019.html): the
torrent's name, then the file's path in it. Only files that a signed manifest names are served.
"""

from __future__ import annotations

from aiohttp import web

from echo_hub.net.publisher import Publisher


def routes(publisher: Publisher) -> list[web.RouteDef]:
    """`GET` and `HEAD` of `/artefacts/{name}/{path}`."""

    async def answer(request: web.Request) -> web.FileResponse:
        path = publisher.file(request.match_info["name"], request.match_info["path"])
        if path is None:
            raise web.HTTPNotFound(text="No published artefact has this file.\n")
        return web.FileResponse(path)

    return [web.get("/artefacts/{name}/{path:.+}", answer)]
