"""Fleets that are too large for one machine: the hub's own planner of deliveries on simulated lines
(`echo_hub.simulator.spreading`).

Every fleet gets the same payload twice, the first time from a hub that knows nothing about its nodes. Time is virtual,
and processing takes no time. The processor time of the planner's calls is measured separately.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from itertools import product
from math import inf
from random import Random
from typing import Any, Final

from benchmarks.dissemination.links import bound_s
from benchmarks.dissemination.rounds import Row
from benchmarks.harness.progress import Planned, Progress
from echo_hub.simulator.agenda import Agenda
from echo_hub.simulator.node import SimulatedNode
from echo_hub.simulator.population import Traits
from echo_hub.simulator.spreading import Spreading
from echo_hub.spread.broadcast import Broadcast, SendPiece
from echo_hub.spread.windows import BroadcastPaths

NUM_NODES: Final = (64, 256, 1_024)
KINDS: Final = ("equal", "unequal")
PAYLOAD_BYTES: Final = 8 * 2**20
HUB_UP, NODE_UP, NODE_DOWN = 20.0, 20.0, 100.0
"""Uplink of the hub, and up- and downlink of equal nodes, in Mbit/s. At these rates a hub comes close to the lower
bound only if all uplinks are busy.
"""
UNEQUAL_UP: Final = (8.0, 40.0)
"""Smallest and largest of the unequal uplinks in Mbit/s; the nodes' uplinks are evenly spaced between them."""
DELAY_S: Final = 0.02
"""One-way delay between two hosts, in seconds."""
VERSIONS: Final = 2
PATIENCE_S: Final = 60.0
"""Virtual seconds after which a version counts as complete on all nodes, even if some still wait."""
BYTES_S: Final = 1e6 / 8
"""Bytes per second at 1 Mbit/s."""


def _name(num_nodes: int, kind: str) -> str:
    return f"simulated {num_nodes} nodes, {kind}"


def plan() -> list[Planned]:
    return [Planned(name=_name(*case), seconds=0.03 * case[0]) for case in product(NUM_NODES, KINDS)]


def measure(seed: int, progress: Progress) -> list[Row]:
    rows = []
    for num_nodes, kind in product(NUM_NODES, KINDS):
        if progress.wants(_name(num_nodes, kind)):
            fleet = SimulatedFleet(uplinks(num_nodes, kind, seed))
            first, *later = [fleet.spread(version) for version in range(1, VERSIONS + 1)]
            figures = {
                "ratio_to_bound": first / fleet.bound_s,
                "later_ratio_to_bound": max(later) / fleet.bound_s,
                "planner_cpu_s": max(planner.cpu_s for planner in fleet.planners),
            }
            rows.append({"side": "simulated", "kind": kind, "nodes": num_nodes, "seconds": first, **figures})
            progress.done(_name(num_nodes, kind), figures)
    return rows


def uplinks(num_nodes: int, kind: str, seed: int) -> list[float]:
    """Return the nodes' uplinks in Mbit/s. `kind`: equal or unequal uplinks."""
    if kind == "equal":
        return [NODE_UP] * num_nodes
    low, high = UNEQUAL_UP
    ups = [low + (high - low) * number / (num_nodes - 1) for number in range(num_nodes)]
    Random(seed).shuffle(ups)
    return ups


class _Timed(Broadcast):
    cpu_s = 0.0

    def join(self, node_id: str, *, hand_on: bool, now: float, have: Collection[int] = ()) -> None:
        began_at = time.thread_time()
        super().join(node_id, hand_on=hand_on, now=now, have=have)
        self.cpu_s += time.thread_time() - began_at

    def have(self, node_id: str, pieces: Any, now: float) -> None:
        began_at = time.thread_time()
        super().have(node_id, pieces, now)
        self.cpu_s += time.thread_time() - began_at

    def plan(self, now: float) -> list[SendPiece]:
        began_at = time.thread_time()
        sends = super().plan(now)
        self.cpu_s += time.thread_time() - began_at
        return sends


class SimulatedFleet:
    """A hub and its nodes on lines without other traffic. The hub decides which nodes are linked. `ups` are the nodes'
    uplinks in Mbit/s.
    """

    def __init__(self, ups: list[float]) -> None:
        self._nodes = [_node(number, up) for number, up in enumerate(ups)]
        self._agenda = Agenda()
        self._had: dict[int, set[str]] = {}
        self.planners: list[_Timed] = []
        self.bound_s = bound_s(PAYLOAD_BYTES, hub_up=HUB_UP, ups=ups, down=NODE_DOWN)
        self._spreading = Spreading(
            agenda=self._agenda,
            hub_uplink_bytes_s=HUB_UP * BYTES_S,
            delay_s=DELAY_S,
            takers=self,
            planner=self._planner,
        )

    def version_arrived(self, node: SimulatedNode, policy_version: int) -> None:
        self._had[policy_version].add(node.node_id)

    def fetch(self, node: SimulatedNode) -> None:
        """Do nothing: a node that fetches a version by BitTorrent or from the web seed is not simulated."""

    def spread(self, version: int) -> float:
        """Announce a version; return the virtual seconds until all nodes have it."""
        began_at = self._agenda.now
        had = self._had[version] = set()
        self._spreading.announce(version, PAYLOAD_BYTES, self._nodes)
        while len(had) < len(self._nodes) and self._agenda.now < began_at + PATIENCE_S:
            # No event is left: a node waits for another transport, which is not simulated.
            if self._agenda.next_at == inf:
                return PATIENCE_S
            self._agenda.advance()
        return self._agenda.now - began_at

    def _planner(self, *, paths: BroadcastPaths, num_pieces: int, piece_bytes: int) -> Broadcast:
        self.planners.append(_Timed(paths=paths, num_pieces=num_pieces, piece_bytes=piece_bytes))
        return self.planners[-1]


def _node(number: int, up: float) -> SimulatedNode:
    traits = Traits(
        width=1,
        capacity=1,
        s_per_token=1.0,
        prefill_s=0.0,
        fetch_s=0.0,
        phase=0.0,
        price_per_hour=0.0,
        uplink_bytes_s=up * BYTES_S,
        downlink_bytes_s=NODE_DOWN * BYTES_S,
    )
    return SimulatedNode(f"node-{number}", number, traits)
