"""A node's process with the receivers of all sides. `python -m benchmarks.dissemination.node_host`."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.dissemination import hostile
from benchmarks.dissemination.baselines import DefaultLibtorrent, PeerAddress, http_fetch
from benchmarks.dissemination.echo_node_side import EchoNode
from benchmarks.dissemination.host import obey


class NodeHost:
    """A node's host at `address`. `rounds` and `faults` call its methods."""

    def __init__(self, address: str, directory: Path) -> None:
        self._address = address
        self._directory = directory
        self._nodes: dict[str, EchoNode] = {}

    async def join(self, side: str, url: str) -> None:
        """Join; return once the node has the base model."""
        self._nodes[side] = EchoNode(url, self._address, self._directory / side)
        await self._nodes[side].open()

    async def turn_hostile(self) -> None:
        """Turn the joined node hostile."""
        hostile.turn()

    async def received(self, side: str, version: int) -> dict[str, Any]:
        """Wait for this version. Returns the time of its verification, and its sources."""
        return await self._nodes[side].received(version)

    async def digest(self, side: str, version: int) -> str:
        """Hash of this version's files on the disk."""
        return await self._nodes[side].digest(version)

    async def has(self, side: str, version: int) -> bool:
        """True if this version has been verified."""
        return self._nodes[side].has(version)

    async def open_baselines(self) -> PeerAddress:
        self._libtorrent = DefaultLibtorrent(self._address)
        await self._libtorrent.open()
        return (self._address, self._libtorrent.port)

    async def http(self, url: str, sha256: str) -> float:
        """Fetch by HTTP; return the time of verification."""
        target = self._directory / "http"
        try:
            return await http_fetch(url, target, sha256)
        finally:
            target.unlink()

    async def libtorrent(self, torrent: str, peers: list[tuple[str, int]], patience_s: float) -> float | None:
        """Fetch with libtorrent; return the time of verification, or None after `patience_s`."""
        addresses = [(str(host), int(port)) for host, port in peers]
        target = self._directory / "libtorrent"
        return await self._libtorrent.fetch(Path(torrent), target, addresses, patience_s=patience_s)

    async def libtorrent_forget(self) -> None:
        await self._libtorrent.remove()
        shutil.rmtree(self._directory / "libtorrent", ignore_errors=True)  # It is missing if no piece came.


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.INFO)
    asyncio.run(obey(NodeHost(sys.argv[1], Path(sys.argv[2]))))
