"""A node's connections to its hub and to other nodes, opened and closed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from echo_node.about import About
from echo_node.config import NodeConfig
from echo_node.host.traffic import TrafficMeter
from echo_node.host.trouble_log import TroubleLog
from echo_node.net.client import HubClient, Introduction
from echo_node.net.flow import Flow
from echo_node.net.hole_punching import HolePunching
from echo_node.net.mesh import MeshLinks
from echo_node.net.online import Online
from echo_node.net.receiver import Receiver
from echo_shared.swarm import Swarm, SwarmSettings, open_swarm
from echo_shared.wire.messages import Links, MeshPeer, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNetwork:
    """Connections of one daemon, to its hub and to other nodes. `client.run` opens the connection to the hub, and
    reconnects.
    """

    swarm: Swarm
    mesh: MeshLinks
    client: HubClient
    receiver: Receiver
    meter: TrafficMeter
    bulk: Online = field(default_factory=Online)
    """Switch for fetching and serving artefacts. The connection to the hub has its own switch, `client.line`."""
    links_are_news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at each change of this node's connections to other nodes."""
    peers: list[MeshPeer] = field(default_factory=list)
    """Nodes that the hub has named on its open connection. The hub names them again only after a change."""

    async def introduce(self, about: About) -> None:
        """Introduce the node to the hub again, after its engine, device or name has changed."""
        await self.client.introduce(_introduction(about, self.swarm, self.mesh))

    def use_mesh(self, peers: Iterable[MeshPeer]) -> None:
        """Connect to these nodes. If this node is offline, it connects once it goes online again."""
        self.peers[:] = peers
        self.mesh.set_peers(self.peers if self.bulk.is_on else ())

    def use_rendezvous(self, sighting_path: str) -> None:
        """Link through routers with the hub's help, at the path that its Welcome names; an empty path = do not link
        through routers.
        """
        self.mesh.use_rendezvous(self.client, sighting_path)

    def set_online(self, is_online: bool) -> None:
        """Go online or offline. Offline stops fetching and serving at once; the hub's connection stays open for unsent
        results.
        """
        self.bulk.turn(on=is_online)
        self.swarm.set_online(is_online)
        self.mesh.set_peers(self.peers if is_online else ())
        if is_online:
            self.client.line.turn(on=True)

    async def hang_up(self) -> None:
        """Also close the hub's connection, until `set_online(True)`."""
        self.peers.clear()
        self.client.line.turn(on=False)
        await self.client.close()

    async def tell_pieces(self) -> None:
        """Report received pieces to the hub. Runs until cancelled, and then ends all receiving."""
        try:
            while True:
                for report in await self.receiver.reports():
                    await self.client.send(report)
        finally:
            self.receiver.close()

    async def tell_links(self) -> None:
        """Tell the hub the nodes to which this node is connected, after each change. Runs until cancelled."""
        while True:
            await self.links_are_news.wait()
            self.links_are_news.clear()
            await self.client.send(Links(node_ids=self.mesh.links, punched=self.mesh.punched))


@dataclass(frozen=True, slots=True)
class _FromMesh:
    """Passes pieces of other nodes to the receiver, and notes changes of links."""

    receiver: Receiver
    links_are_news: asyncio.Event

    def take(self, piece: Piece, sender: str) -> None:
        self.receiver.take(piece, sender)

    def linked(self, _node_ids: tuple[str, ...]) -> None:
        self.links_are_news.set()


@asynccontextmanager
async def open_connections(
    config: NodeConfig, about: About, troubles: TroubleLog, meter: TrafficMeter
) -> AsyncIterator[NodeNetwork]:
    """Listen for other nodes, and prepare the hub's client. Raises SwarmError."""
    settings = SwarmSettings(
        listen_host=config.swarm_host,
        port=config.swarm_port,
        router_ports=config.router_ports,
        upload_limit_bytes_s=config.upload_share_bytes_s,
        download_limit_bytes_s=config.download_share_bytes_s,
    )
    flow = Flow(config.download_share_bytes_s, meter)
    swarm, links_are_news = await open_swarm(settings), asyncio.Event()
    mesh = MeshLinks(
        about.me,
        upload_limit_bytes_s=config.upload_share_bytes_s,
        flow=flow,
        punching=HolePunching(config.swarm_host) if config.punching else None,
    )
    receiver = Receiver(mesh)
    try:
        await mesh.open(config.swarm_host, config.mesh_port, _FromMesh(receiver, links_are_news))
        swarm.open_port(mesh.port)
        client = HubClient(
            about.joining.address,
            me=about.me,
            introduction=_introduction(about, swarm, mesh),
            pinned_hub_key=None if about.joining.pinned is None else about.joining.pinned.hub_key,
            retry_first_s=config.reconnect_first_s,
            stays=config.stay,
            troubles=troubles,
            flow=flow,
        )
        yield NodeNetwork(
            swarm=swarm,
            mesh=mesh,
            client=client,
            receiver=receiver,
            meter=meter,
            links_are_news=links_are_news,
        )
    finally:
        await mesh.close()
        await swarm.close()


def _introduction(about: About, swarm: Swarm, mesh: MeshLinks) -> Introduction:
    """Return the node's introduction, with the ports at which other nodes reach it."""
    return about.introduction(swarm_port=swarm.router.external(swarm.port), mesh_port=swarm.router.external(mesh.port))
