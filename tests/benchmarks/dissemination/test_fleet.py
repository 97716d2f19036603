"""The process that runs on each emulated host, and the benchmark's connection to it."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.dissemination.fleet import NODE_MODULE, Host, HostFailed
from echo_shared.swarm import make_torrent


@pytest.fixture
async def node(tmp_path: Path):
    host = await Host.start(NODE_MODULE, "127.0.0.1", str(tmp_path), prefix=[], log=tmp_path / "node.log")
    yield host
    await host.end()


async def test_a_host_answers_and_reports_errors(node: Host) -> None:
    (host, port), failed = await asyncio.gather(
        node.ask("open_baselines"), node.ask("digest", side="none", version=1), return_exceptions=True
    )
    assert host == "127.0.0.1"
    assert port > 0
    assert isinstance(failed, HostFailed)
    assert "KeyError" in str(failed)


async def test_a_request_to_a_killed_host_fails(node: Host, tmp_path: Path) -> None:
    (tmp_path / "payload").mkdir()
    (tmp_path / "payload" / "file").write_bytes(b"that nobody serves")
    (tmp_path / "torrent").write_bytes(make_torrent(tmp_path / "payload").torrent)
    await node.ask("open_baselines")
    waiting = asyncio.create_task(node.ask("libtorrent", torrent=str(tmp_path / "torrent"), peers=[], patience_s=60.0))
    with pytest.raises(HostFailed):  # The host answers the second request first, so the first is still in progress.
        await node.ask("digest", side="none", version=1)
    await node.kill()
    with pytest.raises(HostFailed, match="ended"):
        await waiting
    with pytest.raises(HostFailed, match="ended"):
        await node.ask("open_baselines")
