"""Distribution: one component that gets every policy version to every node, and knows who has what.

It decides (by `echo_hub.core`): which version a delta is taken against, by which way a version goes, whom the nodes
link with, what nobody needs any more. Others carry it out: the publisher makes and seeds artefacts, the broadcaster
pushes pieces, the connections send messages. What is worth keeping goes to `record`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from echo_hub.config import DisseminationConfig
from echo_hub.core.dissemination import Dissemination, DistributionStatus, Release
from echo_hub.core.ways import ASSUMED_UPLINK_BYTES_S, PUSHED, Circumstances, choose_way
from echo_hub.net.artefact_store import Carrier
from echo_hub.net.broadcaster import Broadcaster
from echo_hub.net.gateway import NodeInfo
from echo_hub.net.publisher import Publisher
from echo_hub.net.tracker import reaches
from echo_shared.errors import RefusedError, StorageError, SwarmError
from echo_shared.messages import (
    MAX_MESH,
    MAX_PIECE_BYTES,
    ArtefactOffer,
    Fetched,
    FromHub,
    Have,
    KeyframeWanted,
    KeysRotated,
    Links,
    Mesh,
    MeshPeer,
    Peers,
    PolicyPublished,
    RefusalCode,
    RunKey,
    Unwanted,
    Way,
)

log = logging.getLogger(__name__)

HOUSEKEEPING_S: Final = 1.0
"""A node is told of changes in the mesh, and of what is unwanted, at most this often."""

KEYFRAME_AGAIN_S: Final = 10.0
"""A node that asks for the same keyframe sooner is not answered."""

KEYFRAMES_WAITING: Final = 1_024
"""Nodes that wait for a keyframe; who comes to a full queue turns to what it was offered before."""

_BANNED: Final = "This hub's operator has banned this node."

Said = Fetched | Have | Links | KeyframeWanted
"""What nodes say that concerns distribution."""


class Connections(Protocol):
    """The open sessions with nodes: the gateway."""

    def send(self, node_id: str, message: FromHub) -> bool:
        """Queues the message; False when the node is not connected. Never waits."""

    def dismiss(self, node_id: str, code: RefusalCode, what: str) -> None:
        """Ends this node's connection, if it has one, and tells it why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A node has verified an artefact that is published here."""

    node_id: str
    fetched: Fetched
    broadcast_s: float | None
    """From the announcement to the node's report; None for who was not connected then, has reported it before, or has
    fetched the base."""


class Distributor:
    """Call `open` and `publish_base`, then keep `run` going. `record` is given every release and every arrival."""

    def __init__(
        self,
        *,
        settings: DisseminationConfig,
        publisher: Publisher,
        broadcaster: Broadcaster,
        connections: Connections,
        record: Callable[[Release | Arrival], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._publisher = publisher
        self._broadcaster = broadcaster
        self._connections = connections
        self._record = record
        self._spread = Dissemination(parents_back=settings.delta_reach)
        self._nodes: dict[str, NodeInfo] = {}
        self._linkable: dict[str, NodeInfo] = {}
        """Of them: those that do not read versions from this host's memory."""
        self._with_base: set[str] = set()
        """Those that have said that the base is theirs: the others do not take pieces yet."""
        self._links: dict[str, frozenset[str]] = {}
        self._told_mesh: dict[str, tuple[MeshPeer, ...]] = {}
        self._told_unwanted: dict[str, frozenset[int]] = {}
        self._newest = 0
        self._lent = 0
        """The version that an evaluation by nodes uses; 0 = none."""
        self._handed_on = 0
        """Bytes that nodes have handed on of the newest version."""
        self._node_uplink: float | None = None
        self._barred: frozenset[str] = frozenset()
        self._keyframes_sent: dict[tuple[str, int], float] = {}
        self._keyframes_wanted: asyncio.Queue[tuple[str, int]] = asyncio.Queue(KEYFRAMES_WAITING)
        self._released: asyncio.Queue[Release] = asyncio.Queue()
        self._changed = asyncio.Event()

    # --- publishing

    async def open(self) -> None:
        """Seeds again what was published before."""
        await self._publisher.reopen()

    async def publish_base(self, model_dir: Path, *, source: str | None = None) -> None:
        """`source`: where nodes find the same files on a model hub, if they are to look there first."""
        await self._publisher.publish_base(model_dir, source=source)

    async def publish(self, version: int, adapter_dir: Path) -> None:
        """Nodes that join from now on are offered it; those that are connected, when it is announced."""
        await self._publish(version, adapter_dir)
        self._newest = max(self._newest, version)

    async def lend(self, version: int, adapter_dir: Path) -> None:
        """This version, in place of the one lent before, stays published for an evaluation, however old it gets."""
        self._publisher.keep(version)
        self._lent = version
        await self._publish(version, adapter_dir)

    async def _publish(self, version: int, adapter_dir: Path) -> None:
        parent = self._spread.delta_parent(version, self._publisher.published())
        await self._publisher.publish_policy(version, adapter_dir, delta_parent=parent)

    def has(self, version: int) -> bool:
        """Whether nodes can fetch it now."""
        return self._publisher.has(version)

    def announce(self, version: int) -> None:
        """Tells every connected node of this version, and begins to send it by the way that is soonest."""
        carrier = self._publisher.carrier(version)
        offers = {node.node_id: self.offer(version, node) for node in self._nodes.values()}
        for node_id in [node_id for node_id, offer in offers.items() if offer.shared_memory is not None]:
            self._linkable.pop(node_id, None)
        pushed = [node_id for node_id in self._linkable if node_id in self._with_base]
        way = self._way(carrier, pushed)
        for node_id, offer in offers.items():
            if node_id in pushed:
                offer = offer.model_copy(update={"way": way})
            self._connections.send(node_id, PolicyPublished(policy_version=version, offer=offer))
        if way in PUSHED:
            self._broadcaster.start(carrier, pushed, hand_on=way is Way.BROADCAST)
        release = Release(
            policy_version=version,
            adapter_bytes=carrier.manifest.total_bytes,
            payload_bytes=carrier.total_bytes,
            carrier="delta" if carrier.manifest.carrier == "delta" else "keyframe",
            way=way,
        )
        self._spread.announced(release, num_pieces=len(carrier.layout.piece_hashes), now=time.monotonic())
        self._newest, self._handed_on = version, 0
        self._released.put_nowait(release)
        self._changed.set()

    def offer(self, version: int, node: NodeInfo) -> ArtefactOffer:
        """This version, or the base (0), for a node that fetches it by itself: one that joins, or has a lease."""
        way = Way.WEB_SEED if self._settings.way == "web_seed" else Way.SWARM
        return self._publisher.offer_for(
            version, node_id=node.node_id, node_ip=node.host, hub_host=node.hub_host, way=way
        )

    def _way(self, carrier: Carrier, node_ids: Sequence[str]) -> Way:
        ends = [
            (one, other)
            for one in node_ids
            for other in self._links.get(one, frozenset()).intersection(node_ids)
            if one in self._links.get(other, frozenset())
        ]
        at = Circumstances(
            payload_bytes=carrier.total_bytes,
            piece_bytes=carrier.layout.piece_bytes,
            num_nodes=len(node_ids),
            num_linked=len({one for one, _ in ends}),
            num_links=len(ends),
            hub_uplink=self.uplink_bytes_s or ASSUMED_UPLINK_BYTES_S,
            node_uplink=self._node_uplink or ASSUMED_UPLINK_BYTES_S,
        )
        return choose_way(at) if self._settings.way == "auto" else pinned(Way(self._settings.way), at)

    # --- nodes

    @property
    def uplink_bytes_s(self) -> float | None:
        """The hub's uplink: the setting, else as measured; None while it is neither."""
        if self._settings.uplink_mbit_s:
            return self._settings.uplink_mbit_s * 1e6 / 8
        return self._broadcaster.uplink_bytes_s

    def node_joined(self, node: NodeInfo) -> None:
        """The session opens next, with nothing awaited in between: the caller offers it the newest version."""
        self._nodes[node.node_id] = node
        self._linkable[node.node_id] = node
        self._told_mesh[node.node_id] = self.mesh_for(node)
        self._told_unwanted[node.node_id] = frozenset()
        self._spread.node_joined(node.node_id, self._newest)
        self._changed.set()

    def node_left(self, node_id: str) -> None:
        for known in (self._nodes, self._linkable, self._links, self._told_mesh, self._told_unwanted):
            known.pop(node_id, None)
        self._with_base.discard(node_id)
        self._keyframes_sent = {k: at for k, at in self._keyframes_sent.items() if k[0] != node_id}
        self._spread.node_left(node_id)
        self._broadcaster.node_left(node_id)
        self._changed.set()

    async def node_said(self, node_id: str, message: Said) -> None:
        match message:
            case Fetched():
                await self._fetched(node_id, message)
            case Have():
                self._broadcaster.said(node_id, message)
                if self._publisher.knows(message.info_hash, self._newest):
                    self._spread.pieces_arrived(node_id, self._newest, len(message.pieces))
            case Links():
                self._links[node_id] = frozenset(message.node_ids)
                self._broadcaster.said(node_id, message)
            case KeyframeWanted():
                if not self._keyframes_wanted.full():
                    self._keyframes_wanted.put_nowait((node_id, message.policy_version))

    async def _fetched(self, node_id: str, message: Fetched) -> None:
        version = message.policy_version
        if not self._publisher.knows(message.info_hash, version):
            log.debug("node %s says that it fetched what is not published", node_id)
            return
        if version is None:
            self._with_base.add(node_id)
        seconds = None if version is None else self._spread.fetched(node_id, version, time.monotonic())
        if seconds is not None and version == self._newest:
            self._handed_on += message.mesh_bytes
            self._estimate_node_uplink()
        await self._record(Arrival(node_id=node_id, fetched=message, broadcast_s=seconds))
        self._changed.set()

    def _estimate_node_uplink(self) -> None:
        """What each node has sent to others, per second, in a whole broadcast: at least so much it can send.

        Where the nodes' uplinks were not what the broadcast waited for they can send more, but the same broadcast
        would still take as long, so the estimate of its time is right either way.
        """
        progress = self._spread.progress(time.monotonic())
        if progress is None or progress.under_way or progress.release.way is not Way.BROADCAST or not progress.since_s:
            return
        if self._handed_on:
            self._node_uplink = self._handed_on / progress.since_s / progress.num_told

    def status(self) -> DistributionStatus:
        return DistributionStatus(
            newest=self._spread.progress(time.monotonic()),
            num_holding=self._spread.num_holding(self._newest),
            num_connected=len(self._nodes),
            uplink_bytes_s=self.uplink_bytes_s,
        )

    # --- who may link with whom, and who may be here

    def mesh_for(self, node: NodeInfo) -> tuple[MeshPeer, ...]:
        """The nodes to link with, whichever of the two connects; none in a fleet too large to be linked."""
        if node.node_id not in self._linkable or len(self._linkable) > MAX_MESH:
            return ()
        return tuple(
            MeshPeer(
                node_id=other.node_id, host=other.host, port=other.mesh_port if reaches(node.host, other.host) else 0
            )
            for other in self._linkable.values()
            if other.node_id != node.node_id
        )

    def admit(self, node_id: str) -> None:
        """Raises RefusedError for a node that is banned."""
        if node_id in self._barred:
            raise RefusedError(
                _BANNED,
                do="Ask the operator, if you think that this is a mistake.",
                code=RefusalCode.BANNED,
            )

    def bar(self, node_ids: Collection[str]) -> None:
        """These nodes, and no others, are banned from now on: what is published next they cannot read.

        Cheap; call it after `open` and before anything is published, and whenever it may have changed.
        """
        self._barred = frozenset(node_ids)
        for node_id in self._nodes.keys() & self._barred:
            self._connections.dismiss(node_id, RefusalCode.BANNED, _BANNED)
        if not self._publisher.bar(self._barred):
            return
        news = KeysRotated(run_keys=self.run_keys())
        for node_id in self._nodes.keys() - self._barred:
            self._connections.send(node_id, news)

    def run_keys(self) -> tuple[RunKey, ...]:
        """Those of everything that is published."""
        return self._publisher.run_keys()

    def introduce(self, info_hash: bytes, peer: tuple[str, int], node_ids: tuple[str, ...]) -> None:
        """Tells these nodes of a new peer in an artefact's swarm."""
        for node_id in node_ids:
            self._connections.send(node_id, Peers(info_hash=info_hash, peers=(peer,)))

    # --- tasks

    async def run(self) -> None:
        """Works until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._broadcaster.run())
            tasks.create_task(self._record_releases())
            tasks.create_task(self._send_keyframes())
            tasks.create_task(self._keep_house())

    async def _record_releases(self) -> None:
        while True:
            await self._record(await self._released.get())

    async def _send_keyframes(self) -> None:
        """To those that ask, one after the other: making one takes a while, once a version."""
        while True:
            node_id, version = await self._keyframes_wanted.get()
            now, asked = time.monotonic(), (node_id, version)
            node = self._nodes.get(node_id)
            if node is None or version not in (self._newest, self._lent) or not self._publisher.has(version):
                continue
            if now - self._keyframes_sent.get(asked, -KEYFRAME_AGAIN_S) < KEYFRAME_AGAIN_S:
                continue
            self._keyframes_sent = {k: at for k, at in self._keyframes_sent.items() if now - at < KEYFRAME_AGAIN_S}
            self._keyframes_sent[asked] = now
            carrier = self._publisher.carrier(version)
            if carrier.manifest.delta_parent is not None:
                self._spread.lacks(node_id, carrier.manifest.delta_parent)
                # It has no use for the delta, and may not confirm what it still gets of it.
                self._broadcaster.said(node_id, Have(info_hash=carrier.info_hash, pieces=(), wanted=False))
            try:
                await self._publisher.publish_keyframe(version)
            except (SwarmError, StorageError) as error:
                log.warning("Policy version %d has no keyframe for node %s: %s", version, node_id, error)
                continue
            self._send_keyframe(version, node)

    def _send_keyframe(self, version: int, node: NodeInfo) -> None:
        carrier = self._publisher.carrier(version, keyframe=True)
        way = self._way(carrier, [node.node_id])
        offer = self._publisher.offer_for(
            version, node_id=node.node_id, node_ip=node.host, hub_host=node.hub_host, way=way, keyframe=True
        )
        self._connections.send(node.node_id, PolicyPublished(policy_version=version, offer=offer))
        if way in PUSHED and offer.shared_memory is None:
            self._broadcaster.start(carrier, [node.node_id], hand_on=False)

    async def _keep_house(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._tell_mesh()
            self._tell_unwanted()
            await asyncio.sleep(HOUSEKEEPING_S)

    def _tell_mesh(self) -> None:
        """Everybody whose peers are others than it was told last."""
        for node_id, node in self._nodes.items():
            peers = self.mesh_for(node)
            if peers != self._told_mesh[node_id] and self._connections.send(node_id, Mesh(peers=peers)):
                self._told_mesh[node_id] = peers

    def _tell_unwanted(self) -> None:
        unwanted = self._spread.unwanted(self._publisher.published(), needed=(self._newest, self._lent))
        hashes = tuple(info_hash for version in sorted(unwanted) for info_hash in self._publisher.info_hashes(version))
        for node_id in self._nodes:
            if unwanted - self._told_unwanted[node_id]:
                self._connections.send(node_id, Unwanted(info_hashes=hashes))
                self._told_unwanted[node_id] = unwanted


def pinned(way: Way, at: Circumstances) -> Way:
    """The way that the settings ask for, or the swarm where that one is not open to this payload."""
    return way if way not in PUSHED or (at.num_nodes and at.piece_bytes <= MAX_PIECE_BYTES) else Way.SWARM
