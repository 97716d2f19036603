from __future__ import annotations

import asyncio
import hashlib
import re
from importlib.metadata import distribution
from pathlib import Path

from aiohttp import ClientSession
from aiohttp.test_utils import make_mocked_request

from echo_hub.dashboard.assets import Assets


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
    asked = make_mocked_request("GET", "/static/echo.css", match_info={"name": "echo.css"})
    answers = await asyncio.gather(*(assets.serve(asked) for _ in range(8)))
    assert len({id(answer.body) for answer in answers}) == 1


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
