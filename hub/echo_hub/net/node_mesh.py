"""The links between nodes: planned neighbours, the peer lists sent to nodes, and the reported links."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache

from echo_hub.net.broadcaster import Broadcaster
from echo_hub.net.gateway import NodeInfo
from echo_hub.net.live_nodes import NodeSender
from echo_hub.net.rendezvous import Rendezvous
from echo_hub.net.tracker import reaches
from echo_hub.spread.neighbours import Neighbours
from echo_shared.wire.messages import Links, MeetWanted, Mesh, MeshPeer


class NodeMesh:
    """Links of all connected nodes, at most `degree` per node."""

    def __init__(
        self, *, degree: int, connections: NodeSender, broadcaster: Broadcaster, rendezvous: Rendezvous | None
    ) -> None:
        """`broadcaster` gives each node the number by which relay instructions name it. `rendezvous` None: nodes behind
        routers do not link with each other.
        """
        self._connections = connections
        self._broadcaster = broadcaster
        self._rendezvous = rendezvous
        self.linkable: dict[str, NodeInfo] = {}
        """Connected nodes that may link with each other, by id."""
        self._neighbours = Neighbours(degree=degree, draw=random.randrange)
        self._links: dict[str, Links] = {}
        """Each node's newest report of the nodes that it is linked with."""
        self._told: dict[str, tuple[MeshPeer, ...]] = {}

    def join(self, node: NodeInfo) -> None:
        """Add a node that is joining: its Welcome names its peers."""
        self.admit(node)
        self._told[node.node_id] = self.peers_of(node)

    def admit(self, node: NodeInfo) -> None:
        """Let a connected node link with other nodes."""
        self.linkable[node.node_id] = node
        self._neighbours.join(node.node_id, listens=node.mesh_port > 0)

    def exclude(self, node_id: str) -> None:
        """Remove all links of a connected node, because it fetches no pieces from other nodes."""
        self.linkable.pop(node_id, None)
        self._neighbours.leave(node_id)

    def leave(self, node_id: str) -> None:
        self.exclude(node_id)
        self._links.pop(node_id, None)
        self._told.pop(node_id, None)
        if self._rendezvous is not None:
            self._rendezvous.forget(node_id)

    def said(self, node_id: str, links: Links) -> None:
        self._links[node_id] = links

    def ends_among(self, node_ids: Iterable[str]) -> list[tuple[str, str]]:
        """Return both ends of every link among these nodes, so each link occurs twice. A link counts if both of its
        nodes report it.
        """
        linked = {node_id: frozenset(self._links[node_id].node_ids) for node_id in node_ids if node_id in self._links}
        return [(one, other) for one, others in linked.items() for other in others if one in linked.get(other, ())]

    def peers_of(self, node: NodeInfo) -> tuple[MeshPeer, ...]:
        """Return the peers with which this node links. Either end may open the connection."""
        others = (self.linkable[other] for other in self._neighbours.of(node.node_id))
        return tuple(
            _mesh_peer(
                other.node_id,
                other.host,
                other.mesh_port if reaches(node.host, other.host) else 0,
                self._broadcaster.number_of(other.node_id),
            )
            for other in others
        )

    def tell(self, nodes: Mapping[str, NodeInfo]) -> None:
        """Send each node whose peers have changed the new list of its peers."""
        for node_id, node in nodes.items():
            peers = self.peers_of(node)
            if peers != self._told[node_id] and self._connections.send(node_id, Mesh(peers=peers)):
                self._told[node_id] = peers

    def meet(self, node_id: str, wanted: MeetWanted) -> None:
        """Tell a node's peer to connect to the node, if the two are to link."""
        node, peer = self.linkable.get(node_id), self.linkable.get(wanted.node_id)
        if self._rendezvous is None or node is None or peer is None:
            return
        if peer.node_id in self._neighbours.of(node_id):
            meet = self._rendezvous.meet(node, wanted, peer, now=time.time())
            if meet is not None:
                self.tell({peer.node_id: peer})  # The peer ignores Meets of nodes that it does not know yet.
                self._connections.send(peer.node_id, meet)


@lru_cache(1_024)
def _mesh_peer(node_id: str, host: str, port: int, number: int) -> MeshPeer:
    """Return the description of a peer for other nodes. Cached, because many nodes get the same one."""
    return MeshPeer(node_id=node_id, host=host, port=port, number=number)
