"""A node's process: all that receives a payload, of every side. `python -m benchmarks.dissemination.node_host`."""

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
    """`address` is this host's own. What is asked of it comes from `benchmarks.dissemination.rounds` and `faults`."""

    def __init__(self, address: str, directory: Path) -> None:
        self._address = address
        self._directory = directory
        self._nodes: dict[str, EchoNode] = {}

    async def join(self, side: str, url: str) -> None:
        """Returns when the node has all but a policy version."""
        self._nodes[side] = EchoNode(url, self._address, self._directory / side)
        await self._nodes[side].open()

    async def turn_hostile(self) -> None:
        """Once it has joined."""
        hostile.turn()

    async def received(self, side: str, version: int) -> dict[str, Any]:
        """Waits for this version: when it was verified, and how it came."""
        return await self._nodes[side].received(version)

    async def digest(self, side: str, version: int) -> str:
        """A hash of this version's files as they lie here."""
        return await self._nodes[side].digest(version)

    async def has(self, side: str, version: int) -> bool:
        """Whether this version has been verified."""
        return self._nodes[side].has(version)

    async def open_baselines(self) -> PeerAddress:
        self._libtorrent = DefaultLibtorrent(self._address)
        await self._libtorrent.open()
        return (self._address, self._libtorrent.port)

    async def http(self, url: str, sha256: str) -> float:
        """When it was there, verified."""
        target = self._directory / "http"
        try:
            return await http_fetch(url, target, sha256)
        finally:
            target.unlink()

    async def libtorrent(self, torrent: str, peers: list[tuple[str, int]], patience_s: float) -> float | None:
        """When it was there, verified; None when it was not after all this time."""
        addresses = [(str(host), int(port)) for host, port in peers]
        target = self._directory / "libtorrent"
        return await self._libtorrent.fetch(Path(torrent), target, addresses, patience_s=patience_s)

    async def libtorrent_forget(self) -> None:
        await self._libtorrent.remove()
        shutil.rmtree(self._directory / "libtorrent", ignore_errors=True)  # None, where nothing had come.


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.INFO)
    asyncio.run(obey(NodeHost(sys.argv[1], Path(sys.argv[2]))))
