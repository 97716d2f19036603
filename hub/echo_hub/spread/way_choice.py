"""Choice of the way in which a version is distributed: the estimated seconds of each way, and the fastest one.

A payload of S bytes goes to N nodes. The hub sends u bytes/s, all nodes together U. No way is faster than

    max(S / u, N S / (u + U))

(Kumar and Ross, Peer-Assisted File Distribution: The Minimum Distribution Time, 2006). Their third term, S over the
slowest node's downlink, is omitted: it limits all ways equally, so it does not affect the choice. The ways:

    INLINE      N S / u                                            every byte leaves the hub N times
    BROADCAST   the bound + BROADCAST_START_S. The hub sends one copy, plus one for each unserved node. With up to
                MOST_IN_A_STAR nodes, unserved means without a link to the piece's owner: S / u becomes
                S (1 + (1 - c) (N - 1)) / u, where c is the existing share of the N (N - 1) links. In a larger fleet,
                nodes without any link are unserved. The last piece then needs FAN_OUT copies by a node at each of
                log N / log FAN_OUT further hops. U counts the linked nodes only
    SWARM       SWARM_FACTOR times the bound + SWARM_START_S

WEB_SEED costs the hub at least as much as INLINE. It is never chosen, only pinned or used as a fallback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Final

from echo_hub.spread.trees import FAN_OUT, HOP_S, MOST_IN_A_STAR
from echo_shared.wire.messages import MAX_PIECE_BYTES, Way

PUSHED: Final = frozenset({Way.INLINE, Way.BROADCAST})
"""Ways in which the hub itself sends pieces to nodes."""

ASSUMED_UPLINK_BYTES_S: Final = 20e6 / 8
"""Assumed uplink of the hub and of each node before any measurement, in bytes per second: 20 Mbit/s, a typical home
connection."""

BROADCAST_START_S: Final = 0.1
"""Seconds from the start of a broadcast until nodes have handed on the first pieces."""

SWARM_START_S: Final = 1.0
SWARM_FACTOR: Final = 1.1
"""Duration of a swarm: SWARM_FACTOR times the lower bound max(S / u, N S / (u + U)) of this module's text, plus
SWARM_START_S seconds. With these values the formula is within 5 % of tuned libtorrent.

Measured at 8 and 64 MB with 4 and 8 nodes, 100 Mbit/s from the hub and 20 to 40 Mbit/s from each node.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Facts on which the choice of the way depends. Uplinks are in bytes per second."""

    payload_bytes: int
    piece_bytes: int
    num_nodes: int
    """Number of nodes that the hub would push to."""
    num_linked: int
    """Number of nodes to push to that are linked with another node to push to."""
    num_links: int
    """Number of links among the pushed-to nodes; each link counts twice, once for each end."""
    hub_uplink: float
    node_uplink: float


def estimates(at: Circumstances) -> Mapping[Way, float]:
    """Return the seconds until all nodes have the version, for each available way."""
    size, nodes, hub = at.payload_bytes, at.num_nodes, at.hub_uplink
    bound = max(size / hub, nodes * size / (hub + nodes * at.node_uplink))
    seconds = {Way.SWARM: SWARM_FACTOR * bound + SWARM_START_S}
    if at.piece_bytes > MAX_PIECE_BYTES:
        return seconds
    seconds[Way.INLINE] = nodes * size / hub
    if at.num_links:
        hops_s = 0.0
        if nodes > MOST_IN_A_STAR:
            copies = 1.0 + nodes - at.num_linked
            hops_s = log(nodes, FAN_OUT) * (FAN_OUT * at.piece_bytes / at.node_uplink + HOP_S)
        else:
            copies = 1 + (1 - at.num_links / (nodes * (nodes - 1))) * (nodes - 1)
        by_all = nodes * size / (hub + at.num_linked * at.node_uplink)
        seconds[Way.BROADCAST] = max(copies * size / hub, by_all) + hops_s + BROADCAST_START_S
    return seconds


def choose_way(at: Circumstances) -> Way:
    """Return the fastest way. If there is no node to push to, return SWARM, from which later nodes can fetch."""
    if at.num_nodes == 0:
        return Way.SWARM
    seconds = estimates(at)
    return min(seconds, key=lambda way: seconds[way])
