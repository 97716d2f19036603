"""The hub serves the install script and its archives, and no other file of their directory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestClient, TestServer

from echo_hub.net import install_routes
from echo_hub.net.install_routes import is_for_windows, routes
from echo_shared.errors import ConfigError

ARCHIVE = "echo-swarm-1.0-linux-x86_64.tar"
Client = TestClient[web.Request, web.Application]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def offered(tmp_path: Path) -> Path:
    (tmp_path / "install.sh").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "install.ps1").write_text("exit 0\n")
    (tmp_path / ARCHIVE).write_bytes(bytes(range(256)) * 4_096)
    (tmp_path / "secret.txt").write_text("nobody's business")
    return tmp_path


@pytest.fixture
async def client(offered: Path) -> AsyncIterator[Client]:
    application = web.Application()
    application.add_routes(routes(str(offered)))
    async with TestClient(TestServer(application)) as client:
        yield client


async def test_the_script_and_its_archive(client: Client, offered: Path) -> None:
    script = await client.get("/install.sh")
    assert (script.status, script.content_type) == (200, "text/plain")
    assert await script.read() == (offered / "install.sh").read_bytes()
    for_windows = await client.get("/install.ps1")
    assert (for_windows.status, for_windows.content_type, for_windows.charset) == (200, "text/plain", "utf-8")
    assert await for_windows.read() == (offered / "install.ps1").read_bytes()
    archive = await client.get(f"/install/{sha256(offered / ARCHIVE)}/{ARCHIVE}")
    assert archive.status == 200 and "immutable" in archive.headers["Cache-Control"]
    assert await archive.read() == (offered / ARCHIVE).read_bytes()


@pytest.mark.parametrize(
    "name", ["secret.txt", "install.sh", "install.ps1", "..%2F..%2Fetc%2Fpasswd", "%2Fetc%2Fpasswd", "%00"]
)
async def test_other_files_of_the_directory_are_not_served(client: Client, offered: Path, name: str) -> None:
    for there in ("secret.txt", "install.sh", ARCHIVE):
        assert (await client.get(f"/install/{sha256(offered / there)}/{name}")).status == 404


async def test_an_archive_by_another_hash_is_not_found(client: Client) -> None:
    answer = await client.get(f"/install/{'0' * 64}/{ARCHIVE}")
    assert answer.status == 404 and "Download the install script again" in await answer.text()


async def test_a_new_archive_is_taken_up_and_the_old_hash_is_gone(client: Client, offered: Path) -> None:
    before = sha256(offered / ARCHIVE)
    assert (await client.get(f"/install/{before}/{ARCHIVE}")).status == 200
    (offered / ARCHIVE).write_bytes(b"another release")
    assert (await client.get(f"/install/{before}/{ARCHIVE}")).status == 404
    assert (await client.get(f"/install/{sha256(offered / ARCHIVE)}/{ARCHIVE}")).status == 200


@pytest.mark.parametrize("name", ["install.sh", "install.ps1"])
async def test_a_script_that_is_gone_is_not_found(client: Client, offered: Path, name: str) -> None:
    (offered / name).unlink()
    assert (await client.get(f"/{name}")).status == 404


def test_windows_is_offered_a_command_while_its_script_exists(offered: Path) -> None:
    assert is_for_windows(str(offered))
    (offered / "install.ps1").unlink()
    assert not is_for_windows(str(offered))
    assert not is_for_windows("")


async def test_too_many_at_once_are_told_to_come_later(
    client: Client, offered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_routes, "MOST_AT_ONCE", 1)
    # Larger than the sockets' buffers, so the transfer lasts until the client reads it.
    (offered / ARCHIVE).write_bytes(bytes(64 * 2**20))
    address = f"/install/{sha256(offered / ARCHIVE)}/{ARCHIVE}"
    async with ClientSession() as session, session.get(client.make_url(address)) as slow:
        assert slow.status == 200
        answer = await client.get(address)
        assert answer.status == 503 and answer.headers["Retry-After"] == "10"
        await slow.read()
    async with asyncio.timeout(60):
        while (await client.head(address)).status == 503:  # noqa: ASYNC110 - no event signals the answer.
            await asyncio.sleep(0)


async def test_without_the_setting_nothing_is_offered() -> None:
    application = web.Application()
    application.add_routes(routes(""))
    async with TestClient(TestServer(application)) as client:
        assert (await client.get("/install.sh")).status == 404
        assert (await client.get("/install.ps1")).status == 404
        assert (await client.get(f"/install/{'0' * 64}/{ARCHIVE}")).status == 404


def test_a_directory_without_a_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to install from") as caught:
        routes(str(tmp_path))
    assert caught.value.do is not None and "make wheelhouse" in caught.value.do
