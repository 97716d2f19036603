"""A base model from a server that speaks the protocol of Hugging Face's model hub."""

import asyncio
import contextlib
import hashlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from echo_node.net import model_hub
from echo_node.net.fetcher import Fetcher
from echo_shared.artefacts.hashed_files import describe_files
from echo_shared.artefacts.manifest import Manifest, open_offer
from echo_shared.errors import SwarmError
from tests.echo_node.net.test_fetcher import make_fetcher, restarted, same_files, swarm

constants = pytest.importorskip("huggingface_hub.constants")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE = f"someone/a-model@{COMMIT}"

__all__ = ["swarm"]


class ModelHub:
    """Serves the files of a directory as one commit of one repository."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.asked: list[tuple[str, str]] = []
        self.tokens: list[str | None] = []
        self.broken: set[str] = set()
        self.changed: set[str] = set()
        self.oversized: set[str] = set()
        self.sent_bytes = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["file"]
        self.asked.append((request.method, name))
        self.tokens.append(request.headers.get("Authorization"))
        if request.match_info["commit"] != COMMIT or not (self.directory / name).exists():
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        if name in self.broken and request.method == "GET":
            return web.Response(status=500)
        data = (self.directory / name).read_bytes()
        if name in self.changed:
            data = bytes([data[0] ^ 1]) + data[1:]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        if name in self.oversized:
            return await self._send_too_much(request, headers)
        return web.Response(body=data, headers=headers)

    async def _send_too_much(self, request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
        """Send 256 MiB, unless the client leaves before."""
        answer = web.StreamResponse(headers={**headers, "Content-Length": str(2**28)})
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            while request.method == "GET" and self.sent_bytes < 2**28:
                await answer.write(bytes(2**20))
                self.sent_bytes += 2**20
        return answer


@pytest.fixture
async def models(hub: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModelHub]:
    """Yield a server that has the hub's base model."""
    served = ModelHub(hub.published(None))
    app = web.Application()
    app.add_routes([web.get("/someone/a-model/resolve/{commit}/{file}", served.answer)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    monkeypatch.setattr(constants, "ENDPOINT", served.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_the_owners")
    yield served
    await runner.cleanup()


@pytest.fixture
def fetcher(hub: Any, swarm: Any, tmp_path: Path) -> Fetcher:
    return make_fetcher(hub, swarm, tmp_path)


def names(hub: Any) -> set[str]:
    return {path.name for path in hub.published(None).iterdir()}


async def test_the_base_comes_from_the_model_hub(hub: Any, models: ModelHub, fetcher: Fetcher) -> None:
    offer = await hub.offer(None, hub.published(None), source=SOURCE)
    seen: list[tuple[int, int]] = []
    fetched = await fetcher.fetch(offer, None, on_progress=lambda done, total: seen.append((done, total)))
    assert same_files(fetcher.directory(None), hub.published(None))
    total = open_offer(offer, hub.me.public_key).total_bytes
    assert (fetched.swarm_bytes, fetched.web_seed_bytes, fetched.model_hub_bytes) == (0, 0, total)
    assert seen[-1] == (total, total)
    assert {name for method, name in models.asked if method == "GET"} == names(hub)
    assert set(models.tokens) == {None}


async def test_whole_files_are_not_asked_for_again(hub: Any, models: ModelHub, tmp_path: Path) -> None:
    manifest = manifest_of(hub)
    models.broken.add("model.safetensors")
    with pytest.raises(SwarmError, match="cannot be fetched from its model hub"):
        await in_thread(manifest, tmp_path / "base")
    models.broken.clear()
    models.asked.clear()
    await in_thread(manifest, tmp_path / "base")
    assert [name for method, name in models.asked if method == "GET"] == ["model.safetensors"]
    assert same_files(tmp_path / "base", hub.published(None))


@pytest.mark.parametrize("trouble", ["broken", "changed", "missing", "no library"])
async def test_the_swarm_takes_over(
    hub: Any,
    models: ModelHub,
    tmp_path: Path,
    trouble: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = SOURCE
    match trouble:
        case "broken":
            models.broken.add("model.safetensors")
        case "changed":
            models.changed.add("model.safetensors")
        case "missing":
            source = f"someone/a-model@{'f' * 40}"
        case "no library":
            monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    offer = await hub.offer(None, hub.published(None), source=source)
    async with restarted(hub, tmp_path) as (fetcher, _):
        fetched = await fetcher.fetch(offer, None)
    assert fetched.swarm_bytes + fetched.web_seed_bytes > 0
    assert same_files(fetcher.directory(None), hub.published(None))
    assert "The swarm takes over" in caplog.text


async def test_the_callers_error_ends_the_download(hub: Any, models: ModelHub, tmp_path: Path) -> None:
    def stop(more_bytes: int) -> None:
        raise SwarmError("enough")

    with pytest.raises(SwarmError, match="enough"):
        await in_thread(manifest_of(hub), tmp_path / "base", stop)


async def test_a_download_ends_behind_the_signed_size(hub: Any, models: ModelHub, tmp_path: Path) -> None:
    models.oversized.add("model.safetensors")
    with pytest.raises(SwarmError, match="larger files than the hub has signed"):
        await in_thread(manifest_of(hub), tmp_path / "base")
    assert models.sent_bytes < 2**26


def manifest_of(hub: Any) -> Manifest:
    manifest = open_offer(hub.offers[None], hub.me.public_key)
    return manifest.model_copy(update={"files": describe_files(hub.published(None)), "source": SOURCE})


async def in_thread(manifest: Manifest, directory: Path, on_bytes: Any = lambda more_bytes: None) -> None:
    await asyncio.to_thread(model_hub.download, manifest, directory, on_bytes)
