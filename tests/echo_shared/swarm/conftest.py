"""A payload, its torrent, and a web server that serves it by range requests."""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from echo_shared.swarm import Torrent, make_torrent

NAME = "run-v000001"


@dataclass
class Payload:
    directory: Path
    torrent: Torrent
    total_bytes: int

    def matches(self, directory: Path) -> bool:
        return all((directory / file.name).read_bytes() == file.read_bytes() for file in self.directory.iterdir())

    def copy_to(self, parent: Path) -> Path:
        return Path(shutil.copytree(self.directory, parent / NAME))


@dataclass
class WebServer:
    url: str = ""
    port: int = 0
    requests: list[str] = field(default_factory=list)
    """The Range header of each request that the server got."""
    root: Path = Path()
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server gets its first request."""
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    """The server answers requests only while this event is set."""


@pytest.fixture
def payload(tmp_path: Path) -> Payload:
    directory = tmp_path / "hub" / NAME
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_bytes(b'{"r": 16}')
    (directory / "adapter_model.safetensors").write_bytes(random.Random(1).randbytes(1_000_000))
    return Payload(directory, make_torrent(directory), 1_000_009)


@pytest.fixture
async def web_server(payload: Payload) -> AsyncIterator[WebServer]:
    server = WebServer(root=payload.directory.parent)
    server.hold.set()

    async def serve(request: web.Request) -> web.StreamResponse:
        server.requests.append(request.headers.get("Range", ""))
        server.asked.set()
        await server.hold.wait()
        path = server.root / request.match_info["path"]
        if not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path)

    app = web.Application()
    app.router.add_get("/artefacts/{path:.+}", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.port = runner.addresses[0][1]
    server.url = f"http://127.0.0.1:{server.port}/artefacts/"
    yield server
    await runner.cleanup()
