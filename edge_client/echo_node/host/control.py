"""The control socket, through which `echo-node status` and other commands reach the running daemon: a websocket on
loopback, JSON both ways.

The port is any free one. A file that only the owner of the data directory can read holds port and secret. A request
without the secret, or from a web page (which sends an Origin header), is refused. The status page uses the same port,
and checks its requests itself.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Protocol, cast

from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import InvalidHandshake, WebSocketException
from websockets.http11 import Request, Response

from echo_shared.errors import ConfigError, ConnectError, EchoError
from echo_shared.files.atomic import write_private

log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
PATIENCE_S: Final = 5.0
MAX_REQUEST_BYTES: Final = 4_096
MOST_OPEN: Final = 16
"""Maximum number of open connections. One more closes the oldest; an honest request takes only milliseconds."""

Verbs = Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]]
"""Handler of each verb: takes the arguments, returns the answer. Handlers run on the event loop and must not block.
`ask` raises the EchoError that a handler raised.
"""


class Page(Protocol):
    """The web page on the control port, `echo_node.status_page.page`."""

    def listens(self, host: str, port: int) -> None:
        """Tell the page its own address."""

    def owns(self, request: Request) -> bool:
        """Return True if the request is for the status page."""

    def respond(self, request: Request) -> Response | None:
        """Answer a request for the status page; None turns it into a websocket."""

    async def converse(self, connection: ServerConnection) -> None:
        """Serve the status page's websocket until it is closed."""


@asynccontextmanager
async def control_server(file: Path, verbs: Verbs, page: Page | None = None) -> AsyncIterator[None]:
    """Serve `verbs` and the page inside the `with` block. Port and secret are written to `file`."""
    token = secrets.token_urlsafe(32)

    def look(connection: ServerConnection, request: Request) -> Response | None:
        if page is not None and page.owns(request):
            return page.respond(request)
        if request.headers.get_all("Origin"):
            return connection.respond(HTTPStatus.FORBIDDEN, "Web pages are not allowed here.\n")
        return None

    async def answer(connection: ServerConnection) -> None:
        assert connection.request is not None, "the handshake is over"
        if page is not None and page.owns(connection.request):
            await page.converse(connection)
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await connection.send(json.dumps(_reply(await connection.recv(), token=token, verbs=verbs)))
        except (TimeoutError, WebSocketException) as error:
            log.info("a control request was interrupted: %s", error)

    incoming = cast("type[ServerConnection]", partial(_Incoming, {}))
    async with serve(
        answer,
        LOOPBACK,
        0,
        process_request=look,
        max_size=MAX_REQUEST_BYTES,
        compression=None,
        open_timeout=PATIENCE_S,
        create_connection=incoming,
    ) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        if page is not None:
            page.listens(LOOPBACK, port)
        write_private(file, json.dumps({"port": port, "token": token, "pid": os.getpid()}).encode())
        try:
            yield
        finally:
            _remove(file)


class _Incoming(ServerConnection):
    """A connection that counts towards MOST_OPEN: any program on this machine can reach the port, and each connection
    takes a file descriptor.
    """

    def __init__(self, others: dict[ServerConnection, None], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._others = others

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._others) >= MOST_OPEN:
            oldest = next(iter(self._others))
            del self._others[oldest]
            oldest.transport.abort()
        self._others[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._others.pop(self, None)


async def ask(file: Path, verb: str, arguments: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return the daemon's answer to the command `verb`. Raises ConnectError if no daemon runs on this data directory,
    ConfigError if the daemon refuses the command.
    """
    try:
        url, token = _where(file)
        async with asyncio.timeout(PATIENCE_S), connect(url, compression=None, proxy=None) as connection:
            await connection.send(json.dumps({"token": token, "verb": verb, "arguments": dict(arguments)}))
            reply: dict[str, Any] = json.loads(await connection.recv())
    except (OSError, ValueError, KeyError, TypeError, WebSocketException, InvalidHandshake, TimeoutError) as error:
        raise ConnectError(
            "No node is running here.",
            got=f"{file}: {type(error).__name__}",
            do="Start one with: echo-node run. Another data directory is chosen with --data-dir DIR.",
            code="not_running",
        ) from error
    if "refused" in reply:
        raise ConfigError(**reply["refused"])
    return reply


async def is_running(file: Path) -> bool:
    try:
        await ask(file, "status")
    except ConnectError:
        return False
    return True


def _where(file: Path) -> tuple[str, str]:
    where = json.loads(file.read_text(encoding="utf-8"))
    return f"ws://{LOOPBACK}:{int(where['port'])}", str(where["token"])


def _remove(file: Path) -> None:
    file.unlink(missing_ok=True)


def _reply(request: str | bytes, *, token: str, verbs: Verbs) -> Mapping[str, Any]:
    try:
        fields = json.loads(request)
        given, verb = str(fields["token"]), str(fields["verb"])
        arguments = dict(fields.get("arguments", {}))
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"error": "not a request"}
    if not hmac.compare_digest(given.encode(), token.encode()):
        return {"error": "wrong token"}
    if verb not in verbs:
        return {"error": f"unknown verb {verb}"}
    try:
        return verbs[verb](arguments)
    except EchoError as error:
        return {"refused": {"what": error.what, "got": error.got, "do": error.do, "code": error.code}}
