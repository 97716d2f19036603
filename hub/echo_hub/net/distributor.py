"""Distribution: delivers every policy version to every node, and tracks which node holds which version.

Decisions come from `echo_hub.core`: the parent version of a delta, the way that a version is sent (push, swarm or web
seed), the links between nodes, and the versions that are no longer needed. Other parts carry them out: the publisher
makes and seeds artefacts, the broadcaster pushes pieces, the connections send messages. Releases and arrivals are
recorded in `books`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol, assert_never

from echo_hub.config.serving_sections import DisseminationConfig
from echo_hub.net.artefact_store import Carrier
from echo_hub.net.broadcaster import Broadcaster
from echo_hub.net.gateway import NodeInfo
from echo_hub.net.live_nodes import LiveNodes, NodeConnections
from echo_hub.net.node_mesh import NodeMesh
from echo_hub.net.publisher import Publisher
from echo_hub.net.rendezvous import Rendezvous
from echo_hub.run.offered_gguf import OfferedGguf
from echo_hub.spread.holdings import Arrival, Dissemination, DistributionStatus, Release
from echo_hub.spread.way_choice import ASSUMED_UPLINK_BYTES_S, PUSHED, Circumstances, choose_way
from echo_shared.errors import RefusedError, StorageError, SwarmError
from echo_shared.wire.messages import (
    MAX_MESH,
    MAX_PIECE_BYTES,
    ArtefactOffer,
    Fetched,
    Have,
    KeyframeWanted,
    KeysRotated,
    Links,
    MeetWanted,
    MeshPeer,
    Peers,
    PolicyPublished,
    RefusalCode,
    RunKey,
    Unwanted,
    Way,
)
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

log = logging.getLogger(__name__)

HOUSEKEEPING_S: Final = 1.0
"""Shortest interval, in seconds, between messages to a node about changed peers or unwanted versions."""

KEYFRAME_AGAIN_S: Final = 10.0
"""Seconds within which a node's repeated request for the same keyframe is ignored."""

KEYFRAME_COLLECT_S: Final = 0.1
"""Seconds to wait after a keyframe request, so that requests of other nodes for the same keyframe share one push."""

RECORDS_WAITING: Final = 4_096
"""Maximum number of unwritten records of releases and arrivals. The handler of a node's report above this limit waits
until all are written."""

RETIRED_REMEMBERED: Final = 64
"""Number of retired versions (no longer published) that nodes are still asked to delete."""

KEYFRAMES_WAITING: Final = 1_024
"""Maximum number of waiting requests by nodes for a keyframe (a whole adapter, where most files are differences between
two versions). The hub drops requests above this limit; such a node then fetches a version that was offered earlier."""

_BANNED: Final = "This hub's operator has banned this node."

Said = Fetched | Have | Links | MeetWanted | KeyframeWanted
"""Messages from nodes about the distribution of versions."""


class DistributionBooks(Protocol):
    """Records the releases and arrivals of versions. Implemented by `echo_hub.distribution.service`."""

    async def record(self, news: Sequence[Release | Arrival]) -> None:
        """Commit releases and arrivals in order. The caller passes all that are waiting in one call."""


class Distributor:
    """Distributes versions. Call `open` and `publish_base`, then keep `run` going."""

    def __init__(
        self,
        *,
        settings: DisseminationConfig,
        publisher: Publisher,
        broadcaster: Broadcaster,
        connections: NodeConnections,
        books: DistributionBooks,
        live: LiveNodes,
        rendezvous: Rendezvous | None = None,
        links_each: int = MAX_MESH,
    ) -> None:
        """`live`: the connected nodes; nodes on standby (without work) hear of a version last. `rendezvous`: see
        `NodeMesh`. `links_each`: maximum number of other nodes that one node is linked with."""
        self._settings = settings
        self._publisher = publisher
        self._broadcaster = broadcaster
        self._connections = connections
        self._books = books
        self._live = live
        self._spread = Dissemination(parents_back=settings.delta_reach)
        self.nodes: dict[str, NodeInfo] = {}
        """Connected nodes by id. When a node reconnects, its entry is a new object."""
        self._mesh = NodeMesh(
            degree=links_each, connections=connections, broadcaster=broadcaster, rendezvous=rendezvous
        )
        self._with_base: set[str] = set()
        """Nodes that reported having the base model. Other nodes accept no pieces of versions yet."""
        self._told_unwanted: dict[str, frozenset[int]] = {}
        self._hashes: dict[int, tuple[bytes, ...]] = {}
        """Info-hashes of each published version: one for each of its carriers (encrypted artefacts)."""
        self._retired: dict[int, tuple[bytes, ...]] = {}
        self._newest = 0
        self._announced = 0
        self._evaluated = 0
        """The version that nodes are evaluating now; 0 if none."""
        self._lent: dict[int, set[str]] = {}
        """The connected nodes that got a lease of a published version, by version."""
        self._handed_on = 0
        """Bytes of the last announced version that nodes have forwarded to each other."""
        self._node_uplink: float | None = None
        self._barred: frozenset[str] = frozenset()
        self._keyframes_sent: dict[tuple[str, int], float] = {}
        self._keyframes_wanted: asyncio.Queue[tuple[str, int]] = asyncio.Queue(KEYFRAMES_WAITING)
        self._to_record: asyncio.Queue[Release | Arrival] = asyncio.Queue()
        self._changed = asyncio.Event()

    # --- publishing

    async def open(self) -> None:
        """Seed everything that was published before a restart of the hub."""
        await self._publisher.reopen()
        self._note_published()

    async def publish_base(
        self, model_dir: Path, *, source: str | None = None, gguf: OfferedGguf | None = None
    ) -> None:
        """Publish the base model. `source`: its id on a model hub, if nodes try to fetch it there first. `gguf`: the
        base model as a GGUF file, for nodes that run llama.cpp."""
        await self._publisher.publish_base(model_dir, source=source)
        await self._publisher.publish_gguf(gguf)

    async def publish(self, version: int, adapter_dir: Path) -> None:
        """Publish a version. Nodes that join later get its offer at once; connected nodes get the offer from
        `announce`."""
        await self._publish(version, adapter_dir)
        self._newest = max(self._newest, version)

    async def keep_for_evaluation(self, version: int, adapter_dir: Path) -> None:
        """Publish a version for an evaluation, and keep it published, however old, until the next call names another
        version.
        """
        self._publisher.keep(version)
        self._evaluated = version
        await self._publish(version, adapter_dir)

    async def publish_for_tenant(self, version: int, adapter_dir: Path) -> None:
        """Publish a tenant's adapter. Only nodes with a lease of this version get its offer."""
        await self._publisher.publish_policy(version, adapter_dir, in_use=self._in_use)
        self._note_published()

    async def withdraw_for_tenant(self, version: int) -> None:
        """Withdraw a tenant's adapter, and let nodes delete it."""
        await self._publisher.withdraw_policy(version)
        self._note_published()

    def hold_for_tenants(self, versions: Iterable[int]) -> None:
        """Keep these versions of tenants published, however old they are, until the next call."""
        self._publisher.hold(versions)

    async def _publish(self, version: int, adapter_dir: Path) -> None:
        parent = self._spread.delta_parent(version, self._publisher.published())
        await self._publisher.publish_policy(version, adapter_dir, delta_parent=parent, in_use=self._in_use)
        self._note_published()

    @property
    def _in_use(self) -> frozenset[int]:
        """Return the versions that nodes are fetching, or that their leases name."""
        return self._spread.wanted() | self._lent.keys()

    def _note_published(self) -> None:
        for version in [version for version in self._hashes if not self._publisher.has(version)]:
            self._retired[version] = self._hashes.pop(version)
            self._lent.pop(version, None)
            for info_hash in self._retired[version]:
                self._broadcaster.end(info_hash)
        for version in self._publisher.published():
            self._hashes[version] = self._publisher.info_hashes(version)
            self._retired.pop(version, None)
        for version in list(self._retired)[:-RETIRED_REMEMBERED]:
            del self._retired[version]
        self._spread.keep(self._hashes)
        self._changed.set()

    def has(self, version: int) -> bool:
        return self._publisher.has(version)

    def announce(self, version: int) -> None:
        """Offer this version to every connected node, and send it by the way that is estimated to be fastest."""
        carrier = self._publisher.carrier(version)
        waiting_last = sorted(self.nodes.values(), key=lambda node: self._live.stands_by(node.node_id))
        way = self._send_out(version, waiting_last)
        release = Release(
            policy_version=version,
            adapter_bytes=carrier.manifest.total_bytes,
            payload_bytes=carrier.total_bytes,
            carrier="delta" if carrier.manifest.carrier == "delta" else "keyframe",
            way=way,
        )
        self._spread.announced(release, num_pieces=len(carrier.layout.piece_hashes), now=time.monotonic())
        self._newest = self._announced = version
        self._handed_on = 0
        self._to_record.put_nowait(release)
        self._changed.set()

    def _send_out(self, version: int, nodes: Iterable[NodeInfo], *, keyframe: bool = False) -> Way | None:
        """Offer the version to these nodes. If the chosen way is a push, start it for the nodes that accept pieces.

        Return the way used; None if all of the nodes read the version from shared memory.
        """
        carrier = self._publisher.carrier(version, keyframe=keyframe)
        offers = {node.node_id: self.offer(version, node, keyframe=keyframe) for node in nodes}
        for node_id, offer in offers.items():
            if offer.shared_memory is None:
                self._mesh.admit(self.nodes[node_id])
            else:
                self._mesh.exclude(node_id)
        able = self._mesh.linkable.keys() & self._with_base
        pushed = [node_id for node_id in offers if node_id in able]
        way = self._way(carrier, pushed)
        for node_id, offer in offers.items():
            if node_id in able:
                offer = offer.model_copy(update={"way": way})
            self._connections.send(node_id, PolicyPublished(policy_version=version, offer=offer))
        if way in PUSHED:
            self._broadcaster.start(carrier, pushed, hand_on=way is Way.BROADCAST)
        return way if any(offer.shared_memory is None for offer in offers.values()) else None

    def offer(self, version: int, node: NodeInfo, *, keyframe: bool = False) -> ArtefactOffer:
        """Return the offer of a version (0: the base model), with which a node fetches the version without pushed
        pieces: from the swarm, or from the hub's web seed if dissemination.way is "web_seed".
        """
        return self._offer(version, node, keyframe=keyframe)

    def _offer(self, version: int, node: NodeInfo, *, keyframe: bool = False, gguf: bool = False) -> ArtefactOffer:
        way = Way.WEB_SEED if self._settings.way == "web_seed" else Way.SWARM
        return self._publisher.offer_for(
            version,
            node_id=node.node_id,
            node_ip=node.host,
            hub_host=node.hub_host,
            way=way,
            keyframe=keyframe,
            gguf=gguf,
        )

    def gguf_offer(self, node: NodeInfo) -> ArtefactOffer | None:
        """Return the offer of the base model's GGUF file, or None without one."""
        return self._offer(0, node, gguf=True) if self._publisher.has_gguf else None

    def lend(self, version: int, node_id: str) -> ArtefactOffer:
        """Return the offer of a version that a lease of this connected node names, and remember that the node uses the
        version. If the node lacks the delta's parent, it will ask for the keyframe."""
        self._lent.setdefault(version, set()).add(node_id)
        return self.offer(version, self.nodes[node_id])

    def _way(self, carrier: Carrier, node_ids: Sequence[str]) -> Way:
        ends = self._mesh.ends_among(node_ids)
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
        """Uplink of the hub in bytes per second: the setting, else the measured rate, else None."""
        if self._settings.uplink_mbit_s:
            return self._settings.uplink_mbit_s * 1e6 / 8
        return self._broadcaster.uplink_bytes_s

    def node_joined(self, node: NodeInfo) -> None:
        """Register a node whose session is about to open. Before its next await, the caller must offer the node the
        newest version: otherwise the node could miss a version that is announced in between.
        """
        self.nodes[node.node_id] = node
        self._mesh.join(node)
        self._told_unwanted[node.node_id] = frozenset()
        self._spread.node_joined(node.node_id, self._announced or self._newest)
        self._changed.set()

    def node_left(self, node_id: str) -> None:
        self._mesh.leave(node_id)
        for known in (self.nodes, self._told_unwanted):
            known.pop(node_id, None)
        self._with_base.discard(node_id)
        for borrowers in self._lent.values():
            borrowers.discard(node_id)
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
                if self._publisher.knows(message.info_hash, self._announced):
                    self._spread.pieces_arrived(node_id, self._announced, len(message.pieces))
            case Links():
                self._mesh.said(node_id, message)
                self._broadcaster.said(node_id, message)
                self._live.linked(node_id, message)
            case MeetWanted():
                self._mesh.meet(node_id, message)
            case KeyframeWanted():
                if not self._keyframes_wanted.full():
                    self._keyframes_wanted.put_nowait((node_id, message.policy_version))
            case _:
                assert_never(message)

    async def _fetched(self, node_id: str, message: Fetched) -> None:
        version = message.policy_version
        if not self._publisher.knows(message.info_hash, version):
            log.debug("node %s reports that it fetched an artefact that is not published", node_id)
            return
        if version is None:
            self._with_base.add(node_id)
        if version is not None and version >= FIRST_TENANT_VERSION:
            return  # The run's figures count only the run's own versions.
        seconds = None if version is None else self._spread.fetched(node_id, version, time.monotonic())
        if seconds is not None and version == self._announced:
            self._handed_on += message.mesh_bytes
            self._estimate_node_uplink()
        self._to_record.put_nowait(Arrival(node_id=node_id, fetched=message, broadcast_s=seconds))
        self._changed.set()
        if self._to_record.qsize() > RECORDS_WAITING:
            await self._to_record.join()

    def _estimate_node_uplink(self) -> None:
        """Estimate a lower bound of a node's uplink: bytes that nodes forwarded, per node and second of a whole
        broadcast.

        The true uplinks may be faster, if the bottleneck was elsewhere. The estimated duration of an equal broadcast is
        still right.
        """
        progress = self._spread.progress(time.monotonic())
        if progress is None or progress.under_way or progress.release.way is not Way.BROADCAST or not progress.since_s:
            return
        if self._handed_on:
            self._node_uplink = self._handed_on / progress.since_s / progress.num_told

    def status(self) -> DistributionStatus:
        return DistributionStatus(
            newest=self._spread.progress(time.monotonic()),
            newest_complete=self._spread.newest_complete(),
            num_holding=self._spread.num_holding(self._newest),
            num_connected=len(self.nodes),
            uplink_bytes_s=self.uplink_bytes_s,
        )

    # --- links between nodes, and bans

    def mesh_for(self, node: NodeInfo) -> tuple[MeshPeer, ...]:
        """Return the peers with which this node links. Either end may open the connection."""
        return self._mesh.peers_of(node)

    def admit(self, node_id: str) -> None:
        """Raise RefusedError for a banned node."""
        if node_id in self._barred:
            raise RefusedError(
                _BANNED,
                do="Ask the operator if you think that this is a mistake.",
                code=RefusalCode.BANNED,
            )

    def bar(self, node_ids: Collection[str]) -> None:
        """Ban exactly these nodes from now on: they cannot decrypt anything published later.

        Call it after `open`, before publishing, and whenever the bans may have changed; without a change it costs
        little.
        """
        self._barred = frozenset(node_ids)
        for node_id in self.nodes.keys() & self._barred:
            self._connections.dismiss(node_id, RefusalCode.BANNED, _BANNED)
        if self._publisher.bar(self._barred):
            self._tell_keys()

    def rotate_key(self) -> None:
        """Create a new run key for later artefacts and send it to the nodes. Raises StorageError."""
        self._publisher.renew_key()
        self._tell_keys()

    def _tell_keys(self) -> None:
        news = KeysRotated(run_keys=self.run_keys())
        for node_id in self.nodes.keys() - self._barred:
            self._connections.send(node_id, news)

    def run_keys(self) -> tuple[RunKey, ...]:
        """Return the run keys with which the published files are encrypted."""
        return self._publisher.run_keys()

    def introduce(self, info_hash: bytes, peer: tuple[str, int], node_ids: tuple[str, ...]) -> None:
        for node_id in node_ids:
            self._connections.send(node_id, Peers(info_hash=info_hash, peers=(peer,)))

    # --- tasks

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._broadcaster.run())
            tasks.create_task(self._keep_records())
            tasks.create_task(self._send_keyframes())
            tasks.create_task(self._keep_house())

    async def _keep_records(self) -> None:
        while True:
            news = [await self._to_record.get()]
            news += [self._to_record.get_nowait() for _ in range(self._to_record.qsize())]
            await self._books.record(news)
            for _ in news:
                self._to_record.task_done()

    async def _send_keyframes(self) -> None:
        """Answer keyframe requests. All requests that arrive within KEYFRAME_COLLECT_S are answered together."""
        while True:
            asked = [await self._keyframes_wanted.get()]
            await asyncio.sleep(KEYFRAME_COLLECT_S)
            asked += [self._keyframes_wanted.get_nowait() for _ in range(self._keyframes_wanted.qsize())]
            now = time.monotonic()
            self._keyframes_sent = {k: at for k, at in self._keyframes_sent.items() if now - at < KEYFRAME_AGAIN_S}
            due = [one for one in dict.fromkeys(asked) if one not in self._keyframes_sent and self._may_need(*one)]
            for version in sorted({version for _, version in due}, reverse=True):
                if self._publisher.has(version):
                    node_ids = [node_id for node_id, of in due if of == version and node_id in self.nodes]
                    self._keyframes_sent |= {(node_id, version): now for node_id in node_ids}
                    await self._send_keyframe(version, node_ids)

    async def _send_keyframe(self, version: int, node_ids: Sequence[str]) -> None:
        """Send a version's keyframe to the nodes that requested the keyframe. Making the keyframe takes a while; it is
        made once per version."""
        carrier = self._publisher.carrier(version)
        parent = carrier.manifest.delta_parent
        if parent is not None:
            for node_id in node_ids:
                self._spread.lacks(node_id, parent)
                # The node cannot use the delta: stop pushing it, and expect no more confirmations of its pieces.
                self._broadcaster.said(node_id, Have(info_hash=carrier.info_hash, pieces=(), wanted=False))
        try:
            await self._publisher.publish_keyframe(version)
        except (SwarmError, StorageError) as error:
            log.warning("Policy version %d has no keyframe for %s: %s", version, ", ".join(node_ids), error)
            return
        self._note_published()
        self._send_out(version, [self.nodes[one] for one in node_ids if one in self.nodes], keyframe=True)

    async def _keep_house(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._mesh.tell(self.nodes)
            self._tell_unwanted()
            await asyncio.sleep(HOUSEKEEPING_S)

    def _tell_unwanted(self) -> None:
        lent = {version for version, borrowers in self._lent.items() if borrowers}
        of_tenants = {version for version in self._hashes if version >= FIRST_TENANT_VERSION}
        unwanted = self._hashes.keys() - self._spread.wanted() - self._current() - lent - of_tenants
        hashes = [one for version in sorted(unwanted) for one in self._hashes[version]]
        hashes += [one for of_version in self._retired.values() for one in of_version]
        versions = frozenset(unwanted | self._retired.keys())
        for node_id in self.nodes:
            if versions - self._told_unwanted[node_id]:
                self._connections.send(node_id, Unwanted(info_hashes=tuple(hashes)))
            self._told_unwanted[node_id] = versions

    def _may_need(self, node_id: str, version: int) -> bool:
        return version in self._current() or node_id in self._lent.get(version, ())

    def _current(self) -> frozenset[int]:
        return frozenset({self._newest, self._announced, self._evaluated})


def pinned(way: Way, at: Circumstances) -> Way:
    """Return the configured way. Replace a push by the swarm if no node can take pushes or the pieces are too large."""
    return way if way not in PUSHED or (at.num_nodes and at.piece_bytes <= MAX_PIECE_BYTES) else Way.SWARM
