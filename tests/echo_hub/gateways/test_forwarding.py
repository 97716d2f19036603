"""A gateway forwards HTTP requests to the hub's port; servers and clients are real."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from echo_hub.gateways.forwarding import Forwarding

BIG = bytes(range(256)) * 4_000


async def hub(request: web.Request) -> web.StreamResponse:
    if request.path == "/file":
        return web.Response(body=BIG, headers={"ETag": '"x"', "Connection": "x-hop", "X-Hop": "1"})
    if request.path == "/half":
        response = web.StreamResponse(headers={"Content-Length": str(len(BIG))})
        await response.prepare(request)
        await response.write(BIG[:1_000])
        assert request.transport is not None
        request.transport.abort()
        return response
    return web.json_response(
        {
            "method": request.method,
            "path": request.raw_path,
            "host": request.host,
            "for": request.headers.get("X-Forwarded-For"),
            "proto": request.headers.get("X-Forwarded-Proto"),
            "hop": request.headers.get("X-Hop"),
            "body": (await request.read()).decode(),
        },
        status=418,
    )


@pytest.fixture
async def serve() -> AsyncIterator[object]:
    runners: list[web.AppRunner] = []

    async def make(routes: list[web.AbstractRouteDef]) -> str:
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield make
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def gateway(serve) -> AsyncIterator[str]:
    forwarding = Forwarding(await serve([web.route("*", "/{path:.*}", hub)]), trusted_proxies=())
    await forwarding.open()
    yield await serve(forwarding.routes())
    await forwarding.close()


async def test_a_forwarded_request_keeps_its_client_address(gateway: str) -> None:
    hops = {"Connection": "X-Hop", "X-Hop": "1", "X-Forwarded-For": "10.9.9.9", "Host": "hub.example.org"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{gateway}/a%2Fb?c=%20d", data="body", headers=hops, allow_redirects=False) as answer,
    ):
        assert answer.status == 418
        assert await answer.json() == {
            "method": "POST",
            "path": "/a%2Fb?c=%20d",
            "host": "hub.example.org",
            "for": "127.0.0.1",
            "proto": "http",
            "hop": None,
            "body": "body",
        }


async def test_a_file_is_forwarded_whole_and_a_broken_one_fails(gateway: str) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{gateway}/file") as answer:
            assert await answer.read() == BIG
            assert answer.headers["ETag"] == '"x"' and "X-Hop" not in answer.headers
        with pytest.raises(aiohttp.ClientError):
            async with http.get(f"{gateway}/half") as answer:
                await answer.read()


@pytest.mark.parametrize("target", ["http://10.9.9.9:1/a?b=c", "http://user@10.9.9.9/a?b=c"])
async def test_a_target_that_names_a_host_goes_to_the_hub_all_the_same(gateway: str, target: str) -> None:
    host, port = gateway.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    async with asyncio.timeout(10):
        answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    assert answer.startswith("HTTP/1.1 418") and '"path": "/a?b=c"' in answer, answer


async def test_an_unreachable_hub_is_reported(serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    forwarding = Forwarding(f"http://127.0.0.1:{port}", trusted_proxies=())
    await forwarding.open()
    url = await serve(forwarding.routes())
    async with aiohttp.ClientSession() as http, http.get(f"{url}/") as answer:
        assert answer.status == 502 and "does not answer" in await answer.text()
    await forwarding.close()
