"""Simulate how versions spread: the hub's own planner decides the route of each piece over simulated connections.

    the hub's uplink   sends planned pieces, one after the other
    a node             reports each piece as soon as it has it, and forwards it over its uplink to the nodes that the
                       plan names, except those that have it; is linked with at most MAX_MESH other nodes

As in the hub's broadcaster, the planner runs after each arriving piece and every `CHECK_S`. A node that receives
nothing for a while fetches the version elsewhere. It has a version `APPLY_S` after its last piece: it hashes, decrypts
and decodes the payload. Not simulated: packet loss, and TCP's search for the available bandwidth.
`tests/echo_hub/simulator/test_spreading.py` compares the times with measured ones (`benchmarks dissemination`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean
from typing import Final, Protocol

import numpy as np

from echo_hub.simulator.agenda import Agenda
from echo_hub.simulator.lines import Downlink, SimulatedUplink
from echo_hub.simulator.node import SimulatedNode
from echo_hub.spread.broadcast import CHECK_S, Broadcast, SendPiece
from echo_hub.spread.neighbours import Neighbours
from echo_hub.spread.way_choice import PUSHED, Circumstances, choose_way, estimates
from echo_hub.spread.windows import BroadcastPaths
from echo_shared.wire.messages import MAX_MESH, Way
from echo_shared.wire.relay_tree import split

APPLY_S: Final = 0.12
"""Seconds from a node's last piece to its verified version, plus TCP's slow start; measured with 0.5 MB on clean
links."""
WIRE: Final = 1.05
"""Bytes on the wire per payload byte. An Ethernet frame of 1,514 bytes carries 1,448 bytes of TCP data, and a small
part of these is websocket framing and other messages."""
SILENCE_S: Final = 3.0
"""Seconds without a piece after which a node fetches the version elsewhere, as real nodes do."""
TOLD_BYTES: Final = 200
"""Bytes on the wire of a message that tells a node to forward a piece it has."""
MOST_PIECES: Final = 65_536
"""Maximum number of pieces, over all nodes together, that are simulated: more would take seconds of processor time per
version."""
USUAL_PIECE_BYTES: Final = 64 * 1024
LEAST_PIECE_BYTES: Final = 16 * 1024
FEWEST_PIECES: Final = 128
MOST_PIECES_OF_ONE: Final = 32_768
PUSHED_VERSIONS: Final = 2
"""Maximum number of versions in distribution at the same time, as at the hub."""


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
    node: SimulatedNode
    uplink: SimulatedUplink
    downlink: Downlink


@dataclass(slots=True, eq=False)
class _Push:
    version: int
    plan: Broadcast
    piece_bytes: float
    """Bytes of one piece on the wire, with protocol overhead."""
    hand_on: bool
    num_pieces: int
    lacks: dict[str, set[int]] = field(default_factory=dict)
    """Pieces that each node still lacks, by node id."""


class VersionTakers(Protocol):
    """Receiver of the versions that arrive at nodes, such as `echo_hub.simulator.fleet.SimulatedFleet`."""

    def version_arrived(self, node: SimulatedNode, policy_version: int) -> None:
        """Handle a version that a node has completely."""

    def fetch(self, node: SimulatedNode) -> None:
        """Let a node fetch the rest of its version by itself, because pushing pieces to it failed."""


class Spreading:
    """Distribution of versions over simulated connections.

    A node that connects later takes part only if `joined` is called.
    """

    def __init__(
        self,
        *,
        agenda: Agenda,
        hub_uplink_bytes_s: float,
        delay_s: float,
        takers: VersionTakers,
        planner: Callable[..., Broadcast] = Broadcast,
    ) -> None:
        """`planner` creates the plan of one version, with the arguments of `Broadcast`."""
        self._agenda = agenda
        self._planner = planner
        self.bytes_pushed = 0.0
        """Bytes that left the hub, without protocol overhead."""
        self._delay_s = delay_s
        self._takers = takers
        self._heard_at: dict[str, float] = {}
        """Start of a node's silence, by node id: the time of its last piece or, if the node lacked no piece before, of
        the announcement."""
        self._uplink = SimulatedUplink(agenda, hub_uplink_bytes_s)
        self._lines: dict[str, _Line] = {}
        self._links: dict[str, frozenset[str]] = {}
        rng = np.random.default_rng(0)
        self._neighbours = Neighbours(degree=MAX_MESH, draw=lambda below: int(rng.integers(below)))
        self._paths = BroadcastPaths()
        self._pushes: dict[int, _Push] = {}
        """Versions being distributed, in order of announcement."""

    def can_carry(self, payload_bytes: float, nodes: Sequence[SimulatedNode]) -> bool:
        """Return True if the hub itself would send pieces to these nodes, and the pieces are few enough to simulate
        each one.
        """
        if not nodes or payload_bytes / piece_bytes_for(ceil(payload_bytes)) * len(nodes) > MOST_PIECES:
            return False
        return payload_bytes > 0 and self.way(payload_bytes, nodes) in PUSHED

    def way(self, payload_bytes: float, nodes: Sequence[SimulatedNode]) -> Way:
        """Return the way of distribution that the hub would choose if all nodes were linked as planned and their
        uplinks known."""
        return choose_way(self._circumstances(payload_bytes, nodes))

    def estimates(self, payload_bytes: float, nodes: Sequence[SimulatedNode]) -> Mapping[Way, float]:
        """Return the seconds that the hub would estimate for each way of distribution."""
        return estimates(self._circumstances(payload_bytes, nodes))

    def _circumstances(self, payload_bytes: float, nodes: Sequence[SimulatedNode]) -> Circumstances:
        size, num_nodes = ceil(payload_bytes), len(nodes)
        links_each = min(num_nodes - 1, MAX_MESH)
        return Circumstances(
            payload_bytes=size,
            piece_bytes=piece_bytes_for(size),
            num_nodes=num_nodes,
            num_linked=num_nodes if num_nodes > 1 else 0,
            num_links=num_nodes * links_each,
            hub_uplink=self._paths.uplink.steady_rate or self._uplink.bytes_s,
            node_uplink=fmean(node.traits.uplink_bytes_s for node in nodes),
        )

    def announce(self, version: int, payload_bytes: float, nodes: Sequence[SimulatedNode]) -> None:
        """Start sending a version to these nodes. Only the newest PUSHED_VERSIONS versions are still sent; older ones
        end."""
        size = ceil(payload_bytes)
        hand_on = self.way(payload_bytes, nodes) is Way.BROADCAST
        piece_bytes = piece_bytes_for(size)
        num_pieces = -(-size // piece_bytes)
        for old in list(self._pushes)[: -(PUSHED_VERSIONS - 1)]:
            self._end(old)
        self._link(nodes)
        plan = self._planner(paths=self._paths, num_pieces=num_pieces, piece_bytes=piece_bytes)
        push = _Push(version, plan, WIRE * size / num_pieces, hand_on, num_pieces)
        for node in nodes:
            self._join(push, node)
        self._pushes[version] = push
        self._plan()
        self._agenda.at(self._agenda.now + CHECK_S, self._check, push)

    def joined(self, node: SimulatedNode) -> None:
        """Add a node that connected while the newest version is being distributed, and that wants it."""
        self._link([*(line.node for line in self._lines.values()), node])
        if self._pushes:
            self._join(self._pushes[max(self._pushes)], node)
            self._plan()

    def _join(self, push: _Push, node: SimulatedNode) -> None:
        if not self._is_waiting(node.node_id):
            self._heard_at[node.node_id] = self._agenda.now
        push.lacks[node.node_id] = set(range(push.num_pieces))
        push.plan.join(node.node_id, hand_on=push.hand_on, now=self._agenda.now)

    def left(self, node: SimulatedNode) -> None:
        """Remove a node that disconnected, with its transfers."""
        node_id = node.node_id
        if self._lines.pop(node_id, None) is None:
            return
        for push in self._pushes.values():
            push.plan.leave(node_id, self._agenda.now)
            push.lacks.pop(node_id, None)
        self._links.pop(node_id, None)
        self._neighbours.leave(node_id)
        self._paths.forget(node_id)

    def _link(self, nodes: Sequence[SimulatedNode]) -> None:
        for node in nodes:
            if node.node_id not in self._lines:
                up, down = node.traits.uplink_bytes_s, node.traits.downlink_bytes_s
                self._lines[node.node_id] = _Line(node, SimulatedUplink(self._agenda, up), Downlink(down))
            self._neighbours.join(node.node_id, listens=True)
        for node_id in self._lines:
            links = frozenset(self._neighbours.of(node_id))
            if links != self._links.get(node_id):
                self._links[node_id] = links
                self._paths.set_links(node_id, links)

    def _end(self, version: int) -> None:
        push = self._pushes.pop(version)
        push.plan.end(self._agenda.now)
        push.lacks.clear()

    def _is_waiting(self, node_id: str) -> bool:
        return any(push.lacks.get(node_id) for push in self._pushes.values())

    def _check(self, push: _Push) -> None:
        if self._pushes.get(push.version) is push:
            for node_id, lacks in list(push.lacks.items()):
                if lacks and self._agenda.now - self._heard_at[node_id] > SILENCE_S:
                    push.plan.turn_away(node_id, self._agenda.now)
                    del push.lacks[node_id]
                    self._takers.fetch(self._lines[node_id].node)
            self._plan()
            self._agenda.at(self._agenda.now + CHECK_S, self._check, push)

    def _plan(self) -> None:
        """Send planned pieces, the newest version first."""
        now = self._agenda.now
        for push in self._pushes.values():
            push.plan.check(now)
        for push in reversed(list(self._pushes.values())):
            for send in push.plan.plan(now):
                size = TOLD_BYTES if send.is_there else push.piece_bytes
                self._uplink.send(size + len(send.hand_on), _FromHub(self, push, send))
            if push.plan.done:
                del self._pushes[push.version]

    def left_sender(
        self, push: _Push, node_id: str, piece: int, send: SendPiece | None, hand_on: bytes, began_at: float
    ) -> None:
        """Handle a piece, or an instruction, that has left the hub (`send` given) or another node (`send` None)."""
        delay_s = self._delay_s
        size = push.piece_bytes if send is None or not send.is_there else TOLD_BYTES
        if send is not None:
            self.bytes_pushed += size / WIRE
        if node_id not in self._lines:
            return
        first_at, last_at = began_at + delay_s, self._agenda.now + delay_s
        there_at = self._lines[node_id].downlink.receive(size, first_at=first_at, last_at=last_at)
        if send is not None and send.is_there:
            self._agenda.at(there_at, self._told, (push, node_id, piece, hand_on))
        else:
            self._agenda.at(there_at, self._came, (push, node_id, piece, hand_on))

    def _told(self, subject: tuple[_Push, str, int, bytes]) -> None:
        """Let a node forward a piece that it already has."""
        push, node_id, piece, hand_on = subject
        if piece not in push.lacks.get(node_id, (piece,)):
            self._hand_on(push, node_id, piece, hand_on)

    def _came(self, subject: tuple[_Push, str, int, bytes]) -> None:
        push, node_id, piece, hand_on = subject
        lacks = push.lacks.get(node_id)
        if lacks is None:
            return
        self._heard_at[node_id] = self._agenda.now
        if hand_on:
            self._hand_on(push, node_id, piece, hand_on)
        if piece in lacks:
            lacks.remove(piece)
            self._agenda.at(self._agenda.now + self._delay_s, self._said, (push, node_id, piece))
            if not lacks:
                self._agenda.at(self._agenda.now + APPLY_S, self._applied, (push, self._lines[node_id]))

    def _hand_on(self, push: _Push, owner_id: str, piece: int, hand_on: bytes) -> None:
        """Forward a piece to the nodes that `hand_on` names, if they are linked. Nodes with longer instructions come
        first, because they have more nodes to supply."""
        links = self._links.get(owner_id, frozenset())
        for number, below in split(hand_on):
            peer_id = self._paths.named(number)
            if peer_id in links:
                self._lines[owner_id].uplink.send(
                    push.piece_bytes + len(below),
                    _FromNode(self, push, owner_id, peer_id, piece, below),
                    rank=-len(below),
                )

    def _said(self, subject: tuple[_Push, str, int]) -> None:
        push, node_id, piece = subject
        push.plan.have(node_id, (piece,), self._agenda.now)
        self._plan()

    def _applied(self, subject: tuple[_Push, _Line]) -> None:
        push, line = subject
        node_id = line.node.node_id
        # The node may have left, or returned without the version.
        if node_id in push.lacks and self._lines.get(node_id) is line:
            self._takers.version_arrived(line.node, push.version)


def piece_bytes_for(total_bytes: int) -> int:
    """Return the piece size that `echo_shared.swarm.torrent` would choose. That package opens files and sockets, so it
    is not imported here."""
    piece_bytes = USUAL_PIECE_BYTES
    while piece_bytes > LEAST_PIECE_BYTES and total_bytes < FEWEST_PIECES * piece_bytes:
        piece_bytes //= 2
    while total_bytes > MOST_PIECES_OF_ONE * piece_bytes:
        piece_bytes *= 2
    return piece_bytes


@dataclass(frozen=True, slots=True)
class _FromHub:
    """A transfer from the hub: a piece, or an instruction to forward a piece."""

    spreading: Spreading
    push: _Push
    send: SendPiece

    def is_wanted(self) -> bool:
        return self.push.plan.left_of(self.send) is not None

    def sent(self, began_at: float) -> None:
        send = self.send
        self.spreading.left_sender(self.push, send.node_id, send.piece, send, send.hand_on, began_at)


@dataclass(frozen=True, slots=True)
class _FromNode:
    """Transfer of a piece from the node `owner_id` to `peer_id`, which forwards it as `below` says."""

    spreading: Spreading
    push: _Push
    owner_id: str
    peer_id: str
    piece: int
    below: bytes

    def is_wanted(self) -> bool:
        lacks = self.push.lacks
        return self.owner_id in lacks and (bool(self.below) or self.piece in lacks.get(self.peer_id, ()))

    def sent(self, began_at: float) -> None:
        self.spreading.left_sender(self.push, self.peer_id, self.piece, None, self.below, began_at)
