import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from echo_shared.errors import LocalProtocolError, StorageError, SwarmError
from echo_shared.swarm import SwarmSettings, make_torrent
from echo_shared.swarm.web_seed import WebSeedSwarm, _batches
from echo_shared.wire.rate_cap import BURST_S


@pytest.fixture
async def node() -> AsyncIterator[WebSeedSwarm]:
    swarm = WebSeedSwarm(SwarmSettings(stall_timeout_s=0.2))
    yield swarm
    await swarm.close()


async def test_fetches_and_reports_progress(node, payload, web_server, tmp_path) -> None:
    progress: list[tuple[int, int]] = []
    stats = await node.fetch(
        payload.torrent.torrent,
        tmp_path / "node",
        peers=[("127.0.0.1", 1)],
        web_seed_url=web_server.url,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert payload.matches(tmp_path / "node" / payload.directory.name)
    assert (stats.swarm_bytes, stats.web_seed_bytes) == (0, payload.total_bytes)
    assert progress[0] == (0, payload.total_bytes)
    assert progress[-1] == (payload.total_bytes, payload.total_bytes)
    assert await node.stats() == {}
    assert await node.traffic() == (0, payload.total_bytes)


async def test_a_rate_cap_limits_the_download(payload, web_server, tmp_path) -> None:
    rate = 4 * payload.total_bytes
    swarm = WebSeedSwarm(SwarmSettings(download_limit_bytes_s=rate))
    began = time.monotonic()
    await swarm.fetch(payload.torrent.torrent, tmp_path / "node", web_seed_url=web_server.url)
    assert payload.total_bytes <= rate * (time.monotonic() - began + BURST_S)
    await swarm.close()


async def test_a_complete_directory_needs_no_request(node, payload, web_server, tmp_path) -> None:
    payload.copy_to(tmp_path / "node")
    stats = await node.fetch(payload.torrent.torrent, tmp_path / "node", web_seed_url=web_server.url)
    assert stats.web_seed_bytes == 0
    assert web_server.requests == []


async def test_a_resumed_download_fetches_only_missing_parts(node, payload, web_server, tmp_path) -> None:
    partial = payload.copy_to(tmp_path / "node") / "adapter_model.safetensors"
    whole = partial.read_bytes()
    # Partial file: it has a hole, and junk bytes follow its end.
    partial.write_bytes(whole[:600_000] + bytes(1_000) + whole[601_000:900_000] + whole)
    stats = await node.fetch(payload.torrent.torrent, tmp_path / "node", web_seed_url=web_server.url)
    assert payload.matches(partial.parent)
    assert 0 < stats.web_seed_bytes < payload.total_bytes / 2
    assert all(request.startswith("bytes=") for request in web_server.requests)


async def test_files_in_directories_with_odd_names_and_no_bytes(node, web_server, tmp_path) -> None:
    directory = tmp_path / "hub" / "base"
    (directory / "sub").mkdir(parents=True)
    (directory / "sub" / "a b%20ü.json").write_bytes(b"x" * 70_000)
    (directory / "empty.txt").touch()
    torrent = make_torrent(directory)
    await node.fetch(torrent.torrent, tmp_path / "node", web_seed_url=web_server.url)
    assert (tmp_path / "node" / "base" / "sub" / "a b%20ü.json").read_bytes() == b"x" * 70_000
    assert (tmp_path / "node" / "base" / "empty.txt").read_bytes() == b""


async def test_the_download_continues_when_the_server_returns(payload, web_server, tmp_path) -> None:
    node = WebSeedSwarm(SwarmSettings())
    published, web_server.root = web_server.root, tmp_path / "nowhere"
    fetch = asyncio.create_task(node.fetch(payload.torrent.torrent, tmp_path / "node", web_seed_url=web_server.url))
    await web_server.asked.wait()
    web_server.root = published
    await fetch
    assert payload.matches(tmp_path / "node" / payload.directory.name)


@pytest.mark.parametrize("damage", ["missing", "corrupt", "short"])
async def test_a_web_seed_that_does_not_deliver_is_reported(node, payload, web_server, tmp_path, damage) -> None:
    weights = payload.directory / "adapter_model.safetensors"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(bytes(1_000_000 if damage == "corrupt" else 10))
    with pytest.raises(SwarmError, match="No peer and no web seed") as caught:
        await node.fetch(payload.torrent.torrent, tmp_path / "node", web_seed_url=web_server.url)
    assert {"missing": "404", "corrupt": "match their hash", "short": "early"}[damage] in str(caught.value)


async def test_a_server_that_ignores_ranges_is_reported(node, payload, tmp_path) -> None:
    async def whole(_: web.Request) -> web.Response:
        return web.Response(body=b"everything")

    app = web.Application()
    app.router.add_get("/{path:.+}", whole)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/artefacts/"
    with pytest.raises(SwarmError, match="No peer and no web seed") as caught:
        await node.fetch(payload.torrent.torrent, tmp_path / "node", web_seed_url=url)
    assert "HTTP status 200" in str(caught.value)
    await runner.cleanup()


async def test_cancelling_ends_the_thread(payload, web_server, tmp_path) -> None:
    web_server.hold.clear()
    node = WebSeedSwarm(SwarmSettings())
    fetch, second = start(node, payload, web_server, tmp_path), start(node, payload, web_server, tmp_path)
    with pytest.raises(LocalProtocolError, match="already"):
        await second
    await web_server.asked.wait()
    assert not (await node.stats())[payload.torrent.info_hash].complete
    fetch.cancel()
    web_server.hold.set()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    assert await node.stats() == {}


async def test_remove_stops_a_fetch(payload, web_server, tmp_path) -> None:
    web_server.hold.clear()
    node = WebSeedSwarm(SwarmSettings())
    fetch = start(node, payload, web_server, tmp_path)
    await web_server.asked.wait()
    removal = asyncio.create_task(node.remove(payload.torrent.info_hash))
    web_server.hold.set()
    await removal
    with pytest.raises(SwarmError, match="removed"):
        await fetch
    assert await node.stats() == {}


async def test_a_directory_that_cannot_be_written_is_a_storage_error(node, payload, web_server, tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        await node.fetch(payload.torrent.torrent, tmp_path / "file", web_seed_url=web_server.url)


async def test_without_a_web_seed_there_is_nothing_to_fetch_from(node, payload, tmp_path) -> None:
    with pytest.raises(SwarmError, match="cannot be fetched"):
        await node.fetch(payload.torrent.torrent, tmp_path / "node")


def test_batches_have_no_gaps() -> None:
    assert list(_batches([0, 1, 2, 3, 7, 9, 10], most=3)) == [range(0, 3), range(3, 4), range(7, 8), range(9, 11)]
    assert list(_batches([], most=3)) == []


def start(node: WebSeedSwarm, payload: Any, web_server: Any, parent: Path) -> "asyncio.Task[Any]":
    return asyncio.create_task(node.fetch(payload.torrent.torrent, parent / "node", web_seed_url=web_server.url))
