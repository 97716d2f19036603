"""By which way a version goes to the nodes: what each way would take, by formula, and the soonest of them.

A payload of S bytes goes to N nodes; the hub sends u bytes/s, the nodes together U. No way is sooner than

    max(S / u, N S / (u + U))

(Kumar and Ross, Peer-Assisted File Distribution: The Minimum Distribution Time, 2006). Their third
term, S over the slowest node's downlink, bounds all ways alike and so tells none from another: it is left out. The ways
themselves:

    INLINE      N S / u                                            every byte leaves the hub N times
    BROADCAST   the bound + BROADCAST_START_S, with one copy from the hub, and another for every node that nobody hands
                the piece to. Of up to MOST_IN_A_STAR nodes these are those that its owner has no link with: S / u
                becomes S (1 + (1 - c) (N - 1)) / u, where c is the share of the N (N - 1) links that are there. Of more
                they are those that have no link at all, and the last piece takes FAN_OUT copies of a node at each of
                log N / log FAN_OUT hops more. U is that of the linked nodes alone
    SWARM       SWARM_FACTOR times the bound + SWARM_START_S

WEB_SEED costs the hub what INLINE does, and more; it is never chosen, only pinned or fallen back to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Final

from echo_hub.core.spread.trees import FAN_OUT, HOP_S, MOST_IN_A_STAR
from echo_shared.messages import MAX_PIECE_BYTES, Way

PUSHED: Final = frozenset({Way.INLINE, Way.BROADCAST})
"""Ways by which the hub sends pieces of its own accord."""

ASSUMED_UPLINK_BYTES_S: Final = 20e6 / 8
"""The uplink of the hub and of each node until something is measured: a home link's."""

BROADCAST_START_S: Final = 0.1
"""Seconds until the first pieces have made their second hop."""

SWARM_START_S: Final = 1.0
SWARM_FACTOR: Final = 1.1
"""With SWARM_START_S and SWARM_FACTOR the formula is within 5 % of tuned libtorrent, measured at 8 and 64 MB with 4 and
8 nodes, 100 Mbit/s from the hub and 20 to 40 from each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What the choice depends on. Uplinks are in bytes per second."""

    payload_bytes: int
    piece_bytes: int
    num_nodes: int
    """Nodes that the hub would push to."""
    num_linked: int
    """Nodes that the hub would push to and that have a link to another of these."""
    num_links: int
    """Links among these nodes, each counted from both its ends."""
    hub_uplink: float
    node_uplink: float
    """The mean of the nodes' uplinks."""


def estimates(at: Circumstances) -> Mapping[Way, float]:
    """Seconds until all nodes have it, by each way that is open."""
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
    """The soonest. With nobody to push to it is the swarm, by which those who come later fetch."""
    if at.num_nodes == 0:
        return Way.SWARM
    seconds = estimates(at)
    return min(seconds, key=lambda way: seconds[way])
