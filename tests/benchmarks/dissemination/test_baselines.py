"""Both baselines of the dissemination benchmark transfer complete payloads over loopback."""

import hashlib
import random
import shutil
from pathlib import Path

import pytest

from benchmarks.dissemination.baselines import DefaultLibtorrent, HttpServer, http_fetch
from echo_shared.swarm import make_torrent

DATA = random.Random(1).randbytes(300_000)


@pytest.fixture
def carrier(tmp_path: Path) -> Path:
    directory = tmp_path / "hub" / "carrier"
    directory.mkdir(parents=True)
    (directory / "payload").write_bytes(DATA)
    return directory


async def test_http(carrier: Path, tmp_path: Path) -> None:
    server = HttpServer("127.0.0.1", carrier.parent)
    await server.open()
    url = f"{server.url}/carrier/payload"
    assert await http_fetch(url, tmp_path / "there", hashlib.sha256(DATA).hexdigest()) > 0
    assert (tmp_path / "there").read_bytes() == DATA
    with pytest.raises(ValueError, match="not what the hub has"):
        await http_fetch(url, tmp_path / "there", "0" * 64)
    await server.close()


async def test_libtorrent(carrier: Path, tmp_path: Path) -> None:
    torrent = tmp_path / "torrent"
    torrent.write_bytes(make_torrent(carrier).torrent)
    hub, node = DefaultLibtorrent("127.0.0.1"), DefaultLibtorrent("127.0.0.1")
    for side in (hub, node):
        await side.open()
    await hub.seed(torrent, carrier.parent)
    for _ in range(2):  # A baseline must be able to send more than once.
        assert await node.fetch(torrent, tmp_path / "node", [("127.0.0.1", hub.port)], patience_s=60) > 0
        await node.remove()
    assert (tmp_path / "node" / "carrier" / "payload").read_bytes() == DATA
    await hub.remove()
    shutil.rmtree(tmp_path / "node")
    assert await node.fetch(torrent, tmp_path / "node", [("127.0.0.1", hub.port)], patience_s=0.01) is None
    for side in (hub, node):
        await side.close()
