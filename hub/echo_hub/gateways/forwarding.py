"""Forward all requests to the hub, except node websockets: files, records, tracker and pages.

The bodies of requests and responses are streamed. The hub learns the client's address and scheme from X-Forwarded
headers (server.trusted_proxies).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import Final

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

from echo_hub.net.client_address import client_ip, is_https
from echo_shared.errors import RemoteProtocolError

CONNECT_S: Final = 5.0
SILENT_S: Final = 60.0
"""A response without data for this many seconds is given up. The hub's live pages send data more often."""
CHUNK_BYTES: Final = 2**18
_OF_ONE_HOP: Final = frozenset(
    name.casefold()
    for name in (
        hdrs.CONNECTION,
        hdrs.KEEP_ALIVE,
        hdrs.PROXY_AUTHENTICATE,
        hdrs.PROXY_AUTHORIZATION,
        hdrs.TE,
        hdrs.TRAILER,
        hdrs.TRANSFER_ENCODING,
        hdrs.UPGRADE,
    )
)
"""Headers that concern only one connection (hop-by-hop), from RFC 9110, section 7.6.1."""


class Forwarding:
    """Forwards requests to the hub. Call `open` inside the event loop, and `close` at the end. `hub_url` must have no
    path."""

    def __init__(self, hub_url: str, trusted_proxies: Collection[str]) -> None:
        self._hub_url = hub_url
        self._proxies = trusted_proxies
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def routes(self) -> list[web.AbstractRouteDef]:
        """Return a route that matches everything; add it after all other routes."""
        return [web.route("*", "/{path:.*}", self._forward)]

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None, "it is open"
        try:
            headers = self._headers(request)
        except RemoteProtocolError as error:
            raise web.HTTPBadRequest(text=f"{error.brief}\n") from error
        try:
            async with self._session.request(
                request.method,
                URL(f"{self._hub_url}{request.rel_url.raw_path_qs}", encoded=True),
                headers=headers,
                data=_body(request) if request.can_read_body else None,
                allow_redirects=False,
            ) as answer:
                return await _passed_on(request, answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise web.HTTPBadGateway(text="The hub does not answer right now. Try again soon.\n") from error

    def _headers(self, request: web.Request) -> CIMultiDict[str]:
        headers = _end_to_end(request.headers)
        headers["X-Forwarded-For"] = client_ip(request, self._proxies)
        headers["X-Forwarded-Proto"] = "https" if is_https(request, self._proxies) else "http"
        return headers


async def _body(request: web.Request) -> AsyncIterator[bytes]:
    async for part in request.content.iter_chunked(CHUNK_BYTES):
        yield part


async def _passed_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_end_to_end(answer.headers))
    await response.prepare(request)
    try:
        async for part in answer.content.iter_chunked(CHUNK_BYTES):
            await response.write(part)
        await response.write_eof()
    except (TimeoutError, aiohttp.ClientError):
        # Abort: the client could mistake a truncated response for a complete one.
        if request.transport is not None:
            request.transport.abort()
    return response


def _end_to_end(headers: CIMultiDict[str] | aiohttp.typedefs.LooseHeaders) -> CIMultiDict[str]:
    """Return the headers except those meant only for the next hop."""
    given = CIMultiDict(headers)
    named = {name.strip().casefold() for each in given.getall(hdrs.CONNECTION, ()) for name in each.split(",")}
    return CIMultiDict(
        (name, value)
        for name, value in given.items()
        if name.casefold() not in _OF_ONE_HOP and name.casefold() not in named
    )
