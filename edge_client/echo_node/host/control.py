"""How `echo-node status` and `echo-node leave` talk to the running daemon: a websocket on loopback, JSON both ways.

The port is any free one. It stands, with a secret, in a file that only the owner of the data directory can read; a
request without the secret, or from a web page (which sends an Origin), is refused.
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
from pathlib import Path
from typing import Any, Final

from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import InvalidHandshake, WebSocketException

from echo_shared.errors import ConnectError
from echo_shared.files import write_private

log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
PATIENCE_S: Final = 5.0
MAX_REQUEST_BYTES: Final = 4_096

Verbs = Mapping[str, Callable[[], Mapping[str, Any]]]
"""What each verb does and answers; called on the event loop, so it must not block."""


@asynccontextmanager
async def control_server(file: Path, verbs: Verbs) -> AsyncIterator[None]:
    """Serves `verbs` while the context is open; `file` then says where."""
    token = secrets.token_urlsafe(32)

    async def answer(connection: ServerConnection) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await connection.send(json.dumps(_reply(await connection.recv(), token=token, verbs=verbs)))
        except (TimeoutError, WebSocketException) as error:
            log.info("a control request broke off: %s", error)

    async with serve(answer, LOOPBACK, 0, origins=[None], max_size=MAX_REQUEST_BYTES, compression=None) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        write_private(file, json.dumps({"port": port, "token": token, "pid": os.getpid()}).encode())
        try:
            yield
        finally:
            _remove(file)


async def ask(file: Path, verb: str) -> dict[str, Any]:
    """The daemon's answer. Raises ConnectError when no daemon runs on this data directory."""
    try:
        url, token = _where(file)
        async with asyncio.timeout(PATIENCE_S), connect(url, compression=None, proxy=None) as connection:
            await connection.send(json.dumps({"token": token, "verb": verb}))
            reply: dict[str, Any] = json.loads(await connection.recv())
    except (OSError, ValueError, KeyError, TypeError, WebSocketException, InvalidHandshake, TimeoutError) as error:
        raise ConnectError(
            "No node is running here.",
            got=f"{file}: {type(error).__name__}",
            do="Start one with: echo-node run. Another data directory is chosen with --data-dir DIR.",
            code="not_running",
        ) from error
    return reply


async def is_running(file: Path) -> bool:
    """Whether a daemon runs on this data directory."""
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
    except (ValueError, KeyError, TypeError):
        return {"error": "not a request"}
    if not hmac.compare_digest(given.encode(), token.encode()):
        return {"error": "wrong token"}
    return verbs[verb]() if verb in verbs else {"error": f"unknown verb {verb}"}
