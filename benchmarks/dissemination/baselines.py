"""Baselines: a hub that serves all nodes over HTTP, and libtorrent with its defaults. Both send the same directory as
Echo.

Baselines need no announcement: their time begins when the nodes begin to fetch.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any, Final

import aiohttp
import libtorrent as lt
from aiohttp import web

PeerAddress = tuple[str, int]
CHUNK_BYTES: Final = 2**18
LIBTORRENT_SETTINGS: Final = {
    # The swarm is private, and its members are known.
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    # All hosts may run on this machine.
    "allow_multiple_connections_per_ip": True,
    "alert_mask": int(lt.alert_category.error | lt.alert_category.status),
}
"""Settings of the libtorrent baseline that differ from libtorrent's defaults, because its hosts are on one machine or
in a private swarm.
"""


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


class HttpServer:
    def __init__(self, address: str, directory: Path) -> None:
        self._address = address
        self._directory = directory
        self.url = ""

    async def open(self) -> None:
        application = web.Application()
        application.add_routes([web.static("/", self._directory)])
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._address, 0).start()
        self.url = f"http://{_in_url(self._address)}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()


async def http_fetch(url: str, target: Path, sha256: str) -> float:
    """Fetch a file and verify its hash; return the time (Unix) of the verification."""
    found = hashlib.sha256()
    forever = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=forever) as http, http.get(url) as answer:
        answer.raise_for_status()
        with target.open("wb") as file:
            async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                found.update(chunk)
                file.write(chunk)
    if found.hexdigest() != sha256:
        raise ValueError(f"{url} gave a file with another SHA-256 than the hub's")
    return time.time()


class DefaultLibtorrent:
    """A libtorrent session that transfers one torrent at a time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.port = 0

    async def open(self) -> None:
        settings: Any = {**LIBTORRENT_SETTINGS, "listen_interfaces": f"{_in_url(self._address)}:0"}
        self._session = lt.session(settings)
        self.port = (await self._until(lt.listen_succeeded_alert)).port

    async def seed(self, torrent: Path, parent: Path) -> None:
        params = self._params(torrent, parent)
        params.flags |= lt.torrent_flags.seed_mode
        self._handle = self._session.add_torrent(params)
        await self._until(lt.torrent_checked_alert)  # Connections made before the check are refused for a minute.

    async def fetch(self, torrent: Path, parent: Path, peers: list[PeerAddress], *, patience_s: float) -> float | None:
        """Fetch a torrent. Return the time when the last piece was checked; None after `patience_s`."""
        params = self._params(torrent, parent)
        params.peers = peers
        self._handle = self._session.add_torrent(params)
        try:
            async with asyncio.timeout(patience_s):
                await self._until(lt.torrent_finished_alert)
        except TimeoutError:
            return None
        return time.time()

    async def remove(self) -> None:
        self._session.remove_torrent(self._handle)
        await self._until(lt.torrent_removed_alert)

    async def close(self) -> None:
        session = [self._session]
        del self._session
        await asyncio.to_thread(session.clear)

    @staticmethod
    def _params(torrent: Path, parent: Path) -> lt.add_torrent_params:
        params = lt.load_torrent_buffer(torrent.read_bytes())
        params.save_path = str(parent)
        params.flags &= ~(lt.torrent_flags.auto_managed | lt.torrent_flags.paused)
        return params

    async def _until(self, kind: type[lt.alert]) -> Any:
        while True:
            await asyncio.to_thread(self._session.wait_for_alert, 500)
            for alert in self._session.pop_alerts():
                if isinstance(alert, kind):
                    return alert
                if isinstance(alert, lt.torrent_error_alert | lt.listen_failed_alert):
                    raise RuntimeError(alert.message())
