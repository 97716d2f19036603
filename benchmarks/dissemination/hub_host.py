"""The hub's process, with the servers of all compared ways to send. `python -m benchmarks.dissemination.hub_host`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from safetensors.numpy import save_file

from benchmarks.dissemination.baselines import DefaultLibtorrent, HttpServer
from benchmarks.dissemination.fleet import obey
from echo_hub.config.sections import HubConfig
from echo_hub.net import artefact_routes, sightings, tracker
from echo_hub.net.artefact_store import Carrier
from echo_hub.net.broadcaster import Broadcaster
from echo_hub.net.distributor import Distributor
from echo_hub.net.gateway import Gateway, NodeInfo
from echo_hub.net.host_memory import HostMemory
from echo_hub.net.live_nodes import LiveNodes
from echo_hub.net.publisher import Publisher
from echo_hub.net.rendezvous import Rendezvous
from echo_hub.net.server import Server
from echo_hub.net.sightings import SIGHTING_PATH, Sightings
from echo_hub.net.tracker import Tracker
from echo_hub.spread.holdings import Arrival, Release
from echo_shared.signing import key_file
from echo_shared.swarm import SwarmSettings, open_swarm
from echo_shared.wire.messages import Fetched, FromNode, Have, KeyframeWanted, Links, MeetWanted, Welcome

RUN: Final = "benchmark"


class EchoHub:
    """The part of a hub that distributes versions: made of the real modules, without learner, store and pages. The
    run's files in the directory survive restarts. The gateway delivers the nodes' messages to this object.
    """

    def __init__(self, address: str, directory: Path, *, way: str, port: int) -> None:
        self._address = address
        self._directory = directory
        self._config = HubConfig.model_validate(
            {
                "server": {"host": address, "port": port, "shared_memory": False},
                "dissemination": {"way": way},
            }
        )
        self._newest = 0
        self._links: dict[str, frozenset[str]] = {}
        self._joined_at: dict[str, float] = {}
        self._link_s: dict[frozenset[str], float] = {}
        """For each linked pair: seconds from the join of the later node to the link."""
        self._linked = asyncio.Condition()

    async def open(self) -> str:
        """Start the hub's servers; return the URL that nodes join."""
        self._directory.mkdir(parents=True, exist_ok=True)
        me = key_file.load_or_create(self._directory / "hub.key")
        self._run_id = f"{me.node_id}-{RUN}"
        swarm = await open_swarm(SwarmSettings(listen_host=self._address))
        self.swarm_port = swarm.port
        self._tracker = Tracker(me)
        self._publisher = Publisher(
            self._directory,
            self._run_id,
            me,
            swarm=swarm,
            tracker=self._tracker,
            memory=HostMemory(enabled=False),
        )
        server = Server(self._config.server)
        gateway = Gateway(me=me, settings=self._config.server, limits=server.limits)
        seen = Sightings(me)
        self.distributor = Distributor(
            settings=self._config.dissemination,
            publisher=self._publisher,
            broadcaster=Broadcaster(gateway),
            connections=gateway,
            books=self,
            live=LiveNodes(),
            rendezvous=Rendezvous(seen, now=time.time()),
        )
        await self.distributor.open()
        await self.distributor.publish_base(await asyncio.to_thread(_write_base, self._directory / "base"))
        routes = [
            *gateway.routes(self),
            *artefact_routes.routes(self._publisher, self._tracker),
            *tracker.routes(self._tracker, introductions=self.distributor),
            *sightings.routes(seen, self._tracker),
        ]
        await server.open(routes)
        self._running = asyncio.create_task(self.distributor.run(), name="distributor")
        return server.url

    @property
    def carriers(self) -> Path:
        return self._directory / "artefacts"

    async def publish(self, version: int, adapter: Path) -> Carrier:
        await self.distributor.publish(version, adapter)
        self._newest = version
        return self._publisher.carrier(version)

    async def linked(self, num_nodes: int, within_s: float | None) -> dict[str, float]:
        """Wait until all pairs of `num_nodes` nodes are linked, at most `within_s`. Return the share of linked pairs,
        and the longest time that a linked pair took.
        """
        pairs = num_nodes * (num_nodes - 1) // 2
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._linked:
                await self._linked.wait_for(lambda: len(self._link_s) == pairs)
        return {"linked_share": len(self._link_s) / pairs, "link_s": max(self._link_s.values(), default=0.0)}

    def _note_links(self, node_id: str, others: frozenset[str]) -> None:
        """Note which pairs are linked: a link counts once both of its nodes report it."""
        self._links[node_id] = others
        linked = {frozenset((node_id, other)) for other in others if node_id in self._links.get(other, ())}
        now = time.monotonic()
        for pair in [pair for pair in self._link_s if node_id in pair and pair not in linked]:
            del self._link_s[pair]
        for pair in linked - self._link_s.keys():
            self._link_s[pair] = now - max(self._joined_at[one] for one in pair)

    async def about(self, node_id: str, token: str | None, nonce: bytes) -> EchoHub:
        return self

    def admit(self, node_id: str) -> None:
        """Admit every node: this replaces a hub's limits on joining."""

    def find_invite(self, node_id: str, token: str | None) -> int | None:
        """Return None, that is, no invite: nodes join this benchmark's hub without one."""
        return None

    def knows(self, node_id: str) -> bool:
        return True

    async def node_joined(self, node: NodeInfo) -> Welcome:
        self._joined_at[node.node_id] = time.monotonic()
        self.distributor.node_joined(node)
        passkey = self._tracker.passkey(node.node_id)
        return Welcome(
            run_id=self._run_id,
            run_name=RUN,
            node_id=node.node_id,
            base=self.distributor.offer(0, node),
            policy=self.distributor.offer(self._newest, node) if self._newest else None,
            policy_version=self._newest,
            tracker_path=f"/announce/{passkey}",
            sighting_path=f"{SIGHTING_PATH}{passkey}",
            heartbeat_s=self._config.server.heartbeat_s,
            run_keys=self._publisher.run_keys(),
            mesh=self.distributor.mesh_for(node),
        )

    async def node_said(self, node_id: str, message: FromNode, frame: bytes) -> None:
        if isinstance(message, Links):
            async with self._linked:
                self._note_links(node_id, frozenset(message.node_ids))
                self._linked.notify_all()
        if isinstance(message, Fetched | Have | Links | MeetWanted | KeyframeWanted):
            await self.distributor.node_said(node_id, message)

    async def node_left(self, node_id: str) -> None:
        self._note_links(node_id, frozenset())
        self.distributor.node_left(node_id)

    async def record(self, news: Sequence[Release | Arrival]) -> None:
        """Store nothing: in this benchmark, the nodes' processes report the arrival of a version."""


def _write_base(directory: Path) -> Path:
    """Write the smallest possible base model, which nodes fetch when they join, before any measurement."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "benchmark"}))
    save_file({"weight": np.zeros(1, np.float32)}, directory / "model.safetensors")
    return directory


class HubHost:
    """The hub's process on the host `address`. The module `rounds` calls its methods."""

    def __init__(self, address: str, directory: Path) -> None:
        self._address = address
        self._directory = directory
        self._hubs: dict[str, EchoHub] = {}

    async def open_echo(self, side: str, way: str, port: int = 0) -> str:
        self._hubs[side] = EchoHub(self._address, self._directory / side, way=way, port=port)
        return await self._hubs[side].open()

    async def open_baselines(self, side: str) -> dict[str, Any]:
        """Open the baselines, an HTTP server and a libtorrent session. Both send the same carriers (encrypted files) as
        the Echo hub of this side (way to send).
        """
        self._http = HttpServer(self._address, self._hubs[side].carriers)
        await self._http.open()
        self._libtorrent = DefaultLibtorrent(self._address)
        await self._libtorrent.open()
        return {"url": self._http.url, "peer": [self._address, self._libtorrent.port]}

    async def prepare(self, side: str, version: int, adapter: str) -> dict[str, Any]:
        """Encode and encrypt a version and make its torrent, without announcing it, so that measured times exclude this
        work.
        """
        carrier = await self._hubs[side].publish(version, Path(adapter))
        # Each hub encrypts the payload with its own key, so the sides have different torrents.
        torrent = self._directory / f"{side} {version}.torrent"
        torrent.write_bytes(carrier.torrent)
        (file,) = (path for path in carrier.directory.iterdir() if path.is_file())
        return {
            "bytes": carrier.total_bytes,
            "file": f"{carrier.directory.name}/{file.name}",
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "torrent": str(torrent),
        }

    async def announce(self, side: str, version: int) -> float:
        began_at = time.time()
        self._hubs[side].distributor.announce(version)
        return began_at

    async def seed(self, torrent: str) -> None:
        await self._libtorrent.seed(Path(torrent), self._hubs["echo"].carriers)

    async def unseed(self) -> None:
        await self._libtorrent.remove()

    async def linked(self, side: str, num_nodes: int, within_s: float | None = None) -> dict[str, float]:
        return await self._hubs[side].linked(num_nodes, within_s)

    async def sent_bytes(self) -> int:
        """Return the bytes that this host has sent over its link, with all headers."""
        return psutil.net_io_counters(pernic=True)["wan"].bytes_sent


def main(host: type[HubHost] = HubHost) -> None:
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.INFO)
    asyncio.run(obey(host(sys.argv[1], Path(sys.argv[2]))))


if __name__ == "__main__":
    main()
