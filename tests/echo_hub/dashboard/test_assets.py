from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from aiohttp import ClientSession

from echo_hub.dashboard import assets
from echo_hub.dashboard.assets import CONTENT_TYPES, Assets

STATIC = Path(assets.__file__).parent / "static"
NAMES = sorted(path.name for path in STATIC.iterdir() if path.suffix in CONTENT_TYPES)


@pytest.mark.parametrize("name", NAMES)
async def test_every_file_is_compressed_and_kept_by_the_browser(hub: ClientSession, name: str) -> None:
    address = Assets().address(name)
    async with hub.get(address, headers={"Accept-Encoding": "gzip"}, auto_decompress=False) as response:
        body = await response.read()
        assert response.status == 200
        assert response.headers["Content-Encoding"] == "gzip"
        assert response.content_type == CONTENT_TYPES[Path(name).suffix]
        assert "immutable" in response.headers["Cache-Control"]
    assert gzip.decompress(body) == (STATIC / name).read_bytes()


async def test_all_that_a_page_loads_is_a_few_dozen_kilobytes(hub: ClientSession) -> None:
    sizes = []
    for name in NAMES:
        async with hub.head(Assets().address(name), headers={"Accept-Encoding": "gzip"}) as response:
            sizes.append(int(response.headers["Content-Length"]))
            assert await response.read() == b""
    assert sum(sizes) < 60_000


async def test_an_address_without_the_right_version_is_asked_for_again(hub: ClientSession) -> None:
    async with hub.get("/static/echo.css?v=old", headers={"Accept-Encoding": "identity"}) as response:
        assert response.headers["Cache-Control"] == "no-cache"
        assert "Content-Encoding" not in response.headers
        assert b":root" in await response.read()
        tag = response.headers["ETag"]
    async with hub.get("/static/echo.css", headers={"If-None-Match": tag}) as again:
        assert again.status == 304


async def test_other_files_are_not_served(hub: ClientSession) -> None:
    for name in ("nothing.js", "uplot.LICENSE", "..%2fmodel.py", "%2e%2e%2f%2e%2e%2fconfig.py", "model.py"):
        async with hub.get(f"/static/{name}") as response:
            assert response.status == 404
