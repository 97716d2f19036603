"""The status page on the daemon's loopback port: a live `echo-node status` with buttons.

It consists of the page, its two files, and a websocket that sends the node's state after changes and accepts `pause`,
`resume` and `finish`. Every request must hold the session's cookie (`access`) and name this host and port in its Host
header: a stranger's domain that resolves to loopback does not. Only the page itself may open the websocket. The page
loads nothing from other servers.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.exceptions import WebSocketException
from websockets.http11 import Request, Response

from echo_node.status_page.access import PageAccess
from echo_shared.errors import EchoError

log = logging.getLogger(__name__)

EVERY_S: Final = 1.0
SEND_S: Final = 10.0
VERBS: Final = ("pause", "resume", "finish")
"""Commands that the page may use."""
TYPES: Final = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
ENTERED: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Echo</title>
<meta http-equiv="refresh" content="0;url=./"><p><a href="./">Continue</a></p></html>
"""
"""The answer to a valid one-time code: a page that loads the status page. A redirect would not do: after a page of
another site, browsers send a SameSite=Strict cookie only with the next request of this site.
"""
CLOSED: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Echo</title>
<meta name="viewport" content="width=device-width"><h1>This page is the node owner's.</h1>
<p>Its address works once, for a minute. Open it again with: <code>echo-node page</code></p></html>
"""

Verb = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class StatusPage:
    """The page's content and actions. `view` returns the JSON to show; `verbs` are the commands of the
    control socket.
    """

    def __init__(self, *, view: Callable[[], Mapping[str, Any]], verbs: Mapping[str, Verb]) -> None:
        self._view = view
        self._verbs = verbs
        self._access = PageAccess()
        self._host = ""

    def listens(self, host: str, port: int) -> None:
        self._host = f"{host}:{port}"

    def invite(self) -> str:
        """Return an address that opens the page once."""
        return f"http://{self._host}{self._access.path}enter?code={self._access.invite()}"

    def owns(self, request: Request) -> bool:
        return request.path.startswith(self._access.path)

    def respond(self, request: Request) -> Response | None:
        """Answer a request for the page; None turns it into a websocket."""
        if request.headers.get_all("Host") != [self._host]:
            return self._answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", b"This is another server.\n")
        if getattr(request, "method", "GET") != "GET":  # Older releases of websockets pass only GET.
            return self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"Only GET is answered here.\n")
        url = urlsplit(request.path)
        name = url.path.removeprefix(self._access.path)
        if name == "enter":
            cookie = self._access.enter(parse_qs(url.query).get("code", [""])[0])
            return self._closed() if cookie is None else self._html(HTTPStatus.OK, ENTERED, cookie)
        if not self._access.is_in("; ".join(request.headers.get_all("Cookie"))):
            return self._closed()
        if name == "live":
            if request.headers.get_all("Origin") == [f"http://{self._host}"]:
                return None
            return self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"Only the page opens this.\n")
        name = name or "page.html"
        if name not in TYPES:
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing here.\n")
        return self._answer(HTTPStatus.OK, TYPES[name], files(__package__).joinpath("static", name).read_bytes())

    async def converse(self, connection: ServerConnection) -> None:
        """Send the state after changes, and carry out the buttons' commands, until the page is closed."""
        news = asyncio.Event()
        sending = asyncio.create_task(self._show(connection, news), name="status page")
        try:
            async for request in connection:
                await self._send(connection, self._do(request))
                news.set()
        except (WebSocketException, TimeoutError) as error:
            log.debug("the status page was closed: %s", error)
        finally:
            sending.cancel()
            await asyncio.wait([sending])

    async def _show(self, connection: ServerConnection, news: asyncio.Event) -> None:
        shown = ""
        try:
            while True:
                if (now := json.dumps({"view": self._view()})) != shown:
                    await self._send(connection, now)
                    shown = now
                try:
                    async with asyncio.timeout(EVERY_S):
                        await news.wait()
                except TimeoutError:
                    continue
                news.clear()
        except (WebSocketException, TimeoutError):
            connection.transport.abort()  # This also ends `converse`, which reads the connection.

    async def _send(self, connection: ServerConnection, text: str) -> None:
        async with asyncio.timeout(SEND_S):
            await connection.send(text)

    def _do(self, request: str | bytes) -> str:
        try:
            fields = json.loads(request)
            verb, arguments = str(fields["verb"]), dict(fields.get("arguments", {}))
        except (ValueError, KeyError, TypeError, RecursionError):
            return json.dumps({"refused": "This is not a request."})
        if verb not in VERBS:
            return json.dumps({"refused": "The page cannot do that."})
        try:
            return json.dumps({"done": verb, **self._verbs[verb](arguments)})
        except EchoError as error:
            return json.dumps({"refused": str(error)})

    def _closed(self) -> Response:
        return self._html(HTTPStatus.FORBIDDEN, CLOSED)

    def _html(self, status: HTTPStatus, text: str, cookie: str | None = None) -> Response:
        answer = self._answer(status, TYPES["page.html"], text.encode())
        if cookie is not None:
            answer.headers["Set-Cookie"] = cookie
        return answer

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> Response:
        headers = Headers(
            {
                "Content-Type": kind,
                "Content-Length": str(len(body)),
                "Connection": "close",
                "Cache-Control": "no-store",
                "Content-Security-Policy": (
                    f"default-src 'none'; script-src 'self'; style-src 'self'; connect-src ws://{self._host}; "
                    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
                ),
                "Cross-Origin-Opener-Policy": "same-origin",
                "Cross-Origin-Resource-Policy": "same-origin",
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY",
            }
        )
        return Response(status.value, status.phrase, headers, body)
