import sys

import libtorrent
import pytest

from echo_shared.swarm import SwarmSettings, open_swarm
from echo_shared.swarm.bittorrent import BitTorrentSwarm
from echo_shared.swarm.web_seed import WebSeedSwarm


async def test_opens_by_libtorrent_and_listens() -> None:
    swarm = await open_swarm(SwarmSettings(listen_host="127.0.0.1"))
    try:
        assert isinstance(swarm, BitTorrentSwarm)
        assert swarm.port > 0
    finally:
        await swarm.close()


async def test_opens_where_libtorrent_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libtorrent", None)
    monkeypatch.delitem(sys.modules, "echo_shared.swarm.bittorrent", raising=False)
    swarm = await open_swarm(SwarmSettings())
    assert isinstance(swarm, WebSeedSwarm)
    assert swarm.port == 0
    await swarm.close()


async def test_opens_where_libtorrent_is_too_old(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(libtorrent.torrent_info, "layout")
    swarm = await open_swarm(SwarmSettings())
    assert isinstance(swarm, WebSeedSwarm)
    assert f"libtorrent {libtorrent.__version__}" in caplog.text and "'layout'" in caplog.text
    await swarm.close()
