"""A node's process, with the receivers of all compared ways to send. `python -m benchmarks.dissemination.node_host`."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.dissemination.baselines import DefaultLibtorrent, PeerAddress, http_fetch
from benchmarks.dissemination.fleet import obey
from benchmarks.dissemination.rounds import digest_of
from echo_node.config import NodeConfig
from echo_node.core.events import ArtefactReady, Event
from echo_node.daemon import Daemon
from echo_node.engine.supervisor import EngineFiles, EngineSupervisor
from echo_node.host.address import HubAddress
from echo_node.host.hubs import Joining
from echo_node.host.paths import NodePaths
from echo_node.panel import NodeSnapshot
from echo_shared.signing import key_file
from echo_shared.wire.messages import Fetched

RECONNECT_FIRST_S: Final = 0.2
SOURCES: Final = {"pushed_bytes", "mesh_bytes", "swarm_bytes", "web_seed_bytes"}


class EchoNode(Daemon):
    """The whole node daemon without an engine. Call `open`, then `received` for each version."""

    def __init__(self, url: str, address: str, directory: Path) -> None:
        paths = NodePaths.find(directory)
        super().__init__(
            paths=paths,
            config=NodeConfig(backend="torch", swarm_host=address, insecure=True, reconnect_first_s=RECONNECT_FIRST_S),
            me=key_file.load_or_create(paths.identity_key),
            joining=Joining(address=HubAddress.parse(url, insecure=True), pinned=None, invite_token=None, patient=True),
            panel=_Unseen(),
        )
        self._here: dict[int, tuple[float, Fetched]] = {}
        self._news = asyncio.Condition()
        self._has_base = asyncio.Event()

    async def open(self) -> None:
        """Join the hub at `url`; return once the node has fetched the base model."""
        self._daemon = asyncio.create_task(self.run(), name="daemon")
        base = asyncio.create_task(self._has_base.wait())
        await asyncio.wait({self._daemon, base}, return_when=asyncio.FIRST_COMPLETED)
        if self._daemon.done():
            self._daemon.result()  # Raises the daemon's error.

    async def received(self, version: int) -> dict[str, Any]:
        """Wait for this version. Return the time at which it was verified, and the bytes from each kind of source."""
        async with self._news:
            await self._news.wait_for(lambda: version in self._here)
        at, fetched = self._here[version]
        return {"at": at, **fetched.model_dump(include=SOURCES)}

    async def digest(self, version: int) -> str:
        """Return the hash of this version's files on disk."""
        return await asyncio.to_thread(digest_of, self._artefact(version))

    async def _tell_shell(self, event: Event) -> None:
        version = event.policy_version if isinstance(event, ArtefactReady) else None
        if isinstance(event, ArtefactReady) and version is None:
            self._has_base.set()
        elif isinstance(event, ArtefactReady) and version is not None:
            async with self._news:
                self._here[version] = (time.time(), event.fetched)
                self._news.notify_all()
        await super()._tell_shell(event)

    def _artefact(self, version: int) -> Path:
        (found,) = self._paths.artefacts.glob(f"*-v{version:06d}")
        return found

    def _make_engine(self, files: EngineFiles) -> EngineSupervisor:
        return _NoEngine()


class _NoEngine(EngineSupervisor):
    """Takes the place of the node's engine, and never finishes loading, so that the node samples nothing."""

    def __init__(self) -> None:
        """Leave out the parts of a real engine."""
        self._child = None

    async def run(self, after_s: float, max_width: int) -> None:
        await asyncio.Event().wait()


class _Unseen:
    def update(self, snapshot: NodeSnapshot) -> None:
        """Do nothing: no status display is needed here."""


class NodeHost:
    """A node's process on the host `address`. The module `rounds` calls its methods."""

    def __init__(self, address: str, directory: Path) -> None:
        self._address = address
        self._directory = directory
        self._nodes: dict[str, EchoNode] = {}

    async def join(self, side: str, url: str) -> None:
        """Join the hub at `url`; return once the node has fetched the base model."""
        self._nodes[side] = EchoNode(url, self._address, self._directory / side)
        await self._nodes[side].open()

    async def received(self, side: str, version: int) -> dict[str, Any]:
        """Wait for this version. Return the time at which it was verified, and the bytes from each kind of source."""
        return await self._nodes[side].received(version)

    async def digest(self, side: str, version: int) -> str:
        """Return the hash of this version's files on disk."""
        return await self._nodes[side].digest(version)

    async def open_baselines(self) -> PeerAddress:
        self._libtorrent = DefaultLibtorrent(self._address)
        await self._libtorrent.open()
        return (self._address, self._libtorrent.port)

    async def http(self, url: str, sha256: str) -> float:
        """Fetch a version's file by HTTP; return the time at which its hash was verified."""
        target = self._directory / "http"
        try:
            return await http_fetch(url, target, sha256)
        finally:
            target.unlink()

    async def libtorrent(self, torrent: str, peers: list[tuple[str, int]], patience_s: float) -> float | None:
        """Fetch a version's files with libtorrent. Return the time at which they were verified; None after
        `patience_s`.
        """
        addresses = [(str(host), int(port)) for host, port in peers]
        target = self._directory / "libtorrent"
        return await self._libtorrent.fetch(Path(torrent), target, addresses, patience_s=patience_s)

    async def libtorrent_forget(self) -> None:
        await self._libtorrent.remove()
        shutil.rmtree(self._directory / "libtorrent", ignore_errors=True)  # There is no directory if no piece arrived.


def main(host: type[NodeHost] = NodeHost) -> None:
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.INFO)
    asyncio.run(obey(host(sys.argv[1], Path(sys.argv[2]))))


if __name__ == "__main__":
    main()
