"""A hub may redirect a node to another path, but only the hub itself gets the node's credentials. All servers are
real.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus, InvalidURI

from echo_node.host.address import HubAddress
from echo_node.net.hub_connection import connection_to
from echo_shared.errors import ConnectError
from echo_shared.signing.identity import Identity
from echo_shared.wire.codec import encode
from echo_shared.wire.credentials import Credentials
from echo_shared.wire.messages import Hello

HELLO = Hello(protocol_version=1, software_version="1", node_key=Identity.generate().public_key, nonce=bytes(32))
CREDENTIALS = Credentials(hello=encode(HELLO))
Serve = Callable[..., Awaitable[tuple[str, list[web.Request]]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Yield a function that starts a server which redirects or answers 401; it returns the server's origin and a list
    of its requests.
    """
    runners: list[web.AppRunner] = []

    async def start(location: str | None = None, *, host: str = "127.0.0.1") -> tuple[str, list[web.Request]]:
        asked: list[web.Request] = []

        async def answer(request: web.Request) -> web.Response:
            asked.append(request)
            if location is None or request.path != "/node":
                return web.Response(status=401)
            return web.Response(status=302, headers={"Location": location})

        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, host, 0).start()
        return f"http://{host}:{runner.addresses[0][1]}", asked

    yield start
    for runner in runners:
        await runner.cleanup()


async def ask(origin: str) -> None:
    address = HubAddress.parse(origin, insecure=False)
    await connect(address.websocket, create_connection=connection_to(address, CREDENTIALS), proxy=None)


async def test_the_hub_is_shown_the_credentials(serve: Serve) -> None:
    origin, asked = await serve()
    with pytest.raises(InvalidStatus, match="401"):
        await ask(origin)
    assert [request.headers["Authorization"] for request in asked] == [CREDENTIALS.header()]


@pytest.mark.parametrize("scheme", ["ws", "http"])
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"], ids=["other_port", "other_host"])
async def test_another_server_that_the_hub_names_is_told_nothing(serve: Serve, scheme: str, host: str) -> None:
    other, of_other = await serve(host=host)
    target = f"{scheme}{other.removeprefix('http')}/node"
    origin, asked = await serve(target)
    with pytest.raises(
        ConnectError if scheme == "ws" else InvalidURI, match="another server" if scheme == "ws" else re.escape(other)
    ):
        await ask(origin)
    assert len(asked) == 1 and of_other == []


async def test_another_path_of_the_hub_gets_the_credentials(serve: Serve) -> None:
    origin, asked = await serve("/prefix/node")
    with pytest.raises(InvalidStatus, match="401"):
        await ask(origin)
    assert [(one.path, one.headers.get("Authorization")) for one in asked] == [
        ("/node", CREDENTIALS.header()),
        ("/prefix/node", CREDENTIALS.header()),
    ]
