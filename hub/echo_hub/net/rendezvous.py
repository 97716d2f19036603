"""Rendezvous: tells two nodes behind routers to connect to each other at the same time. No I/O.

    node a                         hub                          node b
    MeetWanted(b, sightings) ────►
                                   Meet(a, addresses) ────────► connects to a
                                   ◄──── MeetWanted(a, answers)
    connects to b ◄──── Meet(b, addresses, answers)

A router lets packets from an address pass once the home behind it has sent a packet there. Each node's first packet
therefore opens its own router for the other node (RFC 5382 requires that routers pass such a TCP connection).

Nodes are strangers, and a Meet makes a node send packets. So the hub passes on an address only if a TCP connection has
proven that it is the node's own (`sightings`), or if it is a private address and the hub sees both nodes at the same
address. Some providers share one public address among many homes, so two such nodes may be in different networks. The
receiving node therefore uses private addresses of its own network only (`echo_node.net.hole_punching`). The hub limits
the number of Meets by node and by pair.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Final

from echo_hub.net.address_rate import AddressRate
from echo_hub.net.gateway import NodeInfo
from echo_hub.net.sightings import UNKNOWN_PORT, Sightings
from echo_hub.net.tracker import reaches
from echo_shared.errors import RemoteProtocolError
from echo_shared.wire.messages import FIRST_UNPRIVILEGED_PORT, MAX_ADDRESSES, Meet, MeetWanted

WANTED_PER_S: Final = 1_000.0
"""Maximum number of Meets per second that all nodes together may request. A Meet tells a node to connect to another
node."""
WANTED_PER_S_OF_NODE: Final = 16.0
"""Maximum number of Meets per second that one node may request. A new node requests Meets with all of its peers at
once."""
PAIR_AGAIN_S: Final = 3.0
"""Minimum seconds between two requests of a node for Meets with the same peer."""
ANSWER_S: Final = 10.0
"""Seconds within which a node may answer a Meet. A Meet can be answered only once."""


class Rendezvous:
    """Makes the Meets of all nodes. `now`: seconds since the epoch.

    `public`: nodes reach the hub from other networks. A private address that several nodes share is then a proxy's.
    """

    def __init__(self, sightings: Sightings, *, now: float, public: bool = False) -> None:
        self._sightings = sightings
        self._public = public
        self._rate = AddressRate(in_all=WANTED_PER_S, of_one=WANTED_PER_S_OF_NODE, now=now)
        self._asked: dict[str, dict[str, float]] = {}
        """Time of the newest Meet that each node asked for, by node and peer."""
        self._unanswered: dict[str, dict[str, float]] = {}
        """Time of each Meet that was sent and not answered, by receiver and peer."""

    def forget(self, node_id: str) -> None:
        """Forget a node that has disconnected."""
        self._asked.pop(node_id, None)
        self._unanswered.pop(node_id, None)

    def meet(self, node: NodeInfo, wanted: MeetWanted, peer: NodeInfo, *, now: float) -> Meet | None:
        """Return the Meet (an instruction to connect to `node`) to send to `peer`; None if there is none to send.

        The caller must have named the two nodes to each other.
        """
        if not (node.punches and peer.punches):
            return None
        if not (self._may_answer(node, peer, now) if wanted.answers else self._may_ask(node, peer, now)):
            return None
        addresses = tuple(dict.fromkeys(self._addresses(node, wanted, peer, now)))[:MAX_ADDRESSES]
        if not addresses:
            return None
        if not wanted.answers:
            _note(self._unanswered, peer.node_id, node.node_id, now)
        return Meet(node_id=node.node_id, addresses=addresses, answers=wanted.answers)

    def _may_ask(self, node: NodeInfo, peer: NodeInfo, now: float) -> bool:
        last = self._asked.get(node.node_id, {}).get(peer.node_id, 0.0)
        if abs(now - last) < PAIR_AGAIN_S or not self._rate.take(node.node_id, now=now):
            return False
        _note(self._asked, node.node_id, peer.node_id, now)
        return True

    def _may_answer(self, node: NodeInfo, peer: NodeInfo, now: float) -> bool:
        asked_at = self._unanswered.get(node.node_id, {}).pop(peer.node_id, 0.0)
        return abs(now - asked_at) < ANSWER_S

    def _addresses(self, node: NodeInfo, wanted: MeetWanted, peer: NodeInfo, now: float) -> Iterator[tuple[str, int]]:
        for sighting in wanted.sightings:
            try:
                host, port = self._sightings.read(node.node_id, sighting, now=now)
            except RemoteProtocolError:
                continue
            # A connection through a proxy does not show the router's port. Most routers keep the node's own port.
            port = wanted.port if port == UNKNOWN_PORT else port
            if port >= FIRST_UNPRIVILEGED_PORT and _is_of_one_host(host) and reaches(peer.host, host):
                yield host, port
        if node.host == peer.host and self._is_of_router(node.host):
            yield from ((host, wanted.port) for host in wanted.local_hosts if _is_local(host))

    def _is_of_router(self, host: str) -> bool:
        """Return True if two nodes with this address are probably behind one router. Return False for a proxy's
        address, which says nothing about their networks."""
        return _is_of_one_host(host) and (ipaddress.ip_address(host).is_global or not self._public)


def _note(times: dict[str, dict[str, float]], node_id: str, peer_id: str, now: float) -> None:
    """Set the time of a pair to `now`. Drop the node's times that are older than `ANSWER_S`, because they no longer
    matter."""
    kept = {other: at for other, at in times.get(node_id, {}).items() if abs(now - at) < ANSWER_S}
    times[node_id] = {**kept, peer_id: now}


def _is_of_one_host(host: str) -> bool:
    """Return True for an address of one host on a network; False for loopback, multicast and other special ones."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return not (
        address.is_loopback
        or address.is_multicast
        or address.is_unspecified
        or address.is_link_local
        or address.is_reserved
    )


def _is_local(host: str) -> bool:
    return _is_of_one_host(host) and ipaddress.ip_address(host).is_private
