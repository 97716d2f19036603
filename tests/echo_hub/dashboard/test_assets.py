from __future__ import annotations

import asyncio
import hashlib
import re
from importlib.metadata import distribution
from pathlib import Path

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer, make_mocked_request

from echo_hub.dashboard.assets import PIECE_BYTES, PLOTLY, Assets


def packaged_plotly() -> bytes:
    return Path(str(distribution("plotly").locate_file("plotly/package_data/plotly.min.js"))).read_bytes()


def without_style_of_maps(script: bytes) -> bytes:
    """It makes a style element as soon as it is loaded, which the pages' policy refuses."""
    made, count = re.subn(rb'!document\.getElementById\("[0-9a-f]{64}"\)', b"false", script)
    assert count == 1
    return made


async def test_plotly_is_served_from_its_package_and_kept_by_the_browser(hub: ClientSession) -> None:
    address = Assets().address("plotly.min.js")
    async with hub.get(address) as response:
        body = await response.read()
        assert response.status == 200
        assert response.headers["Content-Encoding"] == "gzip"
        assert response.content_type == "text/javascript"
        assert "immutable" in response.headers["Cache-Control"]
    assert hashlib.sha256(body).digest() == hashlib.sha256(without_style_of_maps(packaged_plotly())).digest()


async def test_however_many_ask_at_once_a_file_is_in_memory_once() -> None:
    assets = Assets()
    asked = make_mocked_request("GET", f"/static/{PLOTLY}", match_info={"name": PLOTLY})
    answers = await asyncio.gather(*(assets.serve(asked) for _ in range(8)))
    pieces = [piece for answer in answers async for piece in answer.body._value]
    assert len({id(piece.obj) for piece in pieces}) == 1
    assert max(map(len, pieces)) == PIECE_BYTES


async def test_of_a_file_that_nobody_reads_a_few_pieces_wait() -> None:
    assets, asked = Assets(), asyncio.get_running_loop().create_future()

    async def serve(request: web.Request) -> web.StreamResponse:
        asked.set_result(request.transport)
        return await assets.serve(request)

    app = web.Application()
    app.router.add_get("/static/{name}", serve)
    async with TestServer(app) as server:
        _, writer = await asyncio.open_connection(server.host, server.port, limit=1_024)
        writer.write(f"GET /static/{PLOTLY} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        transport = await asked
        async with asyncio.timeout(20.0):
            while not transport.get_write_buffer_size():  # noqa: ASYNC110
                await asyncio.sleep(0)
        for _ in range(1_000):
            await asyncio.sleep(0)
        assert 0 < transport.get_write_buffer_size() <= 4 * PIECE_BYTES
        writer.transport.abort()


async def test_who_asks_only_about_a_file_gets_its_length(hub: ClientSession) -> None:
    async with hub.head(f"/static/{PLOTLY}", headers={"Accept-Encoding": "identity"}) as response:
        assert response.headers["Content-Length"] == str(len(without_style_of_maps(packaged_plotly())))
        assert await response.read() == b""


async def test_an_address_without_the_right_version_is_asked_for_again(hub: ClientSession) -> None:
    async with hub.get("/static/echo.css?v=old", headers={"Accept-Encoding": "identity"}) as response:
        assert response.headers["Cache-Control"] == "no-cache"
        assert "Content-Encoding" not in response.headers
        assert b":root" in await response.read()
        tag = response.headers["ETag"]
    async with hub.get("/static/echo.css", headers={"If-None-Match": tag}) as again:
        assert again.status == 304


async def test_nothing_else_can_be_had(hub: ClientSession) -> None:
    for name in ("nothing.js", "..%2fmodel.py", "%2e%2e%2f%2e%2e%2fconfig.py", "model.py"):
        async with hub.get(f"/static/{name}") as response:
            assert response.status == 404
