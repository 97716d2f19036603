"""The hub's process with the servers of all sides. `python -m benchmarks.dissemination.hub_host`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.dissemination.baselines import DefaultLibtorrent, HttpServer
from benchmarks.dissemination.echo_hub_side import EchoHub
from benchmarks.dissemination.host import obey


class HubHost:
    """The hub's host at `address`. `rounds` and `faults` call its methods."""

    def __init__(self, address: str, directory: Path) -> None:
        self._address = address
        self._directory = directory
        self._hubs: dict[str, EchoHub] = {}

    async def open_echo(self, side: str, way: str, port: int = 0) -> str:
        """Open a hub; return its URL."""
        self._hubs[side] = EchoHub(self._address, self._directory / side, way=way, port=port)
        return await self._hubs[side].open()

    async def open_baselines(self, side: str) -> dict[str, Any]:
        """Open the baselines, which send the carriers of this side's hub."""
        self._http = HttpServer(self._address, self._hubs[side].carriers)
        await self._http.open()
        self._libtorrent = DefaultLibtorrent(self._address)
        await self._libtorrent.open()
        return {"url": self._http.url, "peer": [self._address, self._libtorrent.port]}

    async def prepare(self, side: str, version: int, adapter: str) -> dict[str, Any]:
        """Publish without an announcement."""
        began_at = time.perf_counter()
        carrier = await self._hubs[side].publish(version, Path(adapter))
        seconds = time.perf_counter() - began_at
        torrent = self._directory / f"{side} {version}.torrent"  # Each hub seals for itself.
        torrent.write_bytes(carrier.torrent)
        (file,) = (path for path in carrier.directory.iterdir() if path.is_file())
        return {
            "seconds": seconds,
            "bytes": carrier.total_bytes,
            "file": f"{carrier.directory.name}/{file.name}",
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "torrent": str(torrent),
        }

    async def announce(self, side: str, version: int) -> float:
        """Announce a version; return the time."""
        began_at = time.time()
        self._hubs[side].announce(version)
        return began_at

    async def seed(self, torrent: str) -> None:
        await self._libtorrent.seed(Path(torrent), self._hubs["echo"].carriers)

    async def unseed(self) -> None:
        await self._libtorrent.remove()

    async def linked(self, side: str, num_nodes: int) -> None:
        """Wait until this many nodes are all linked with each other."""
        await self._hubs[side].linked(num_nodes)

    async def silence_tracker(self, side: str) -> None:
        self._hubs[side].tracker_is_down = True

    async def swarm_port(self, side: str) -> int:
        return self._hubs[side].swarm_port


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.INFO)
    asyncio.run(obey(HubHost(sys.argv[1], Path(sys.argv[2]))))
