"""Fleets that are too large for one machine: the hub's own planner on simulated lines (`echo_hub.simulator.spreading`).

Every fleet gets the same payload twice, the first time from a hub that knows nothing about its nodes. Time is virtual,
without processor time. The planner's processor time is measured by repeating its calls.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any, Final, Literal

from benchmarks.dissemination.rounds import Row
from benchmarks.harness.progress import Planned, Progress
from echo_hub.core.spread.broadcast import Broadcast, Send
from echo_hub.core.spread.windows import Paths
from echo_hub.simulator.agenda import Agenda
from echo_hub.simulator.node import SimulatedNode
from echo_hub.simulator.population import Traits
from echo_hub.simulator.spreading import Spreading
from echo_shared.messages import Way

Kind = Literal["equal", "unequal", "some hand on nothing", "one joins late"]

SIDE: Final = "simulated"
NUM_NODES: Final = (64, 256, 1_024)
KINDS: Final[tuple[Kind, ...]] = ("equal", "unequal", "some hand on nothing", "one joins late")
HEADLINE_KINDS: Final[tuple[Kind, ...]] = ("equal", "unequal")
PAYLOAD_BYTES: Final = 8 * 2**20
HUB_UP, NODE_UP, NODE_DOWN = 20.0, 20.0, 100.0
"""Mbit/s of equal nodes, whose uplinks must not idle."""
UNEQUAL_UP: Final = (8.0, 40.0)
"""Range of unequal uplinks in Mbit/s, evenly spread."""
DELAY_S: Final = 0.02
"""One-way delay between any two hosts."""
SILENT_SHARE: Final = 0.1
"""Share of nodes that hand on nothing: their uplinks carry messages but no pieces."""
SILENT_UP: Final = 1e-4
JOINS_AT: Final = 0.5
"""Time of a late join, in multiples of the bound."""
VERSIONS: Final = 2
PATIENCE_S: Final = 60.0
"""Virtual time after which a node counts as complete."""
MOST_CPU_S: Final = 20.0
"""Most processor time of one version. A version that takes more ends there, and its time so far counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCase:
    num_nodes: int
    kind: Kind

    @property
    def name(self) -> str:
        return f"simulated {self.num_nodes} nodes, {self.kind}"


def cases() -> list[SimulatedCase]:
    return [SimulatedCase(num_nodes=num_nodes, kind=kind) for num_nodes in NUM_NODES for kind in KINDS]


def plan() -> list[Planned]:
    return [Planned(name=case.name, seconds=0.03 * case.num_nodes) for case in cases()]


def measure(seed: int, progress: Progress) -> list[Row]:
    return [_measured(case, seed, progress) for case in cases() if progress.wants(case.name)]


def _measured(case: SimulatedCase, seed: int, progress: Progress) -> Row:
    fleet = SimulatedFleet(case, seed)
    first, *later = [fleet.spread(version) for version in range(1, VERSIONS + 1)]
    row = {
        "side": SIDE,
        "kind": case.kind,
        "nodes": case.num_nodes,
        "hub_up_mbit_s": HUB_UP,
        "payload_bytes": PAYLOAD_BYTES,
        "bound_s": fleet.bound_s,
        "seconds": first,
        "ratio_to_bound": first / fleet.bound_s,
        "later_ratio_to_bound": max(later) / fleet.bound_s,
        "estimate_over_seconds": fleet.estimate_s / first,
        "planner_cpu_s": max(recording.cpu_s() for recording in fleet.recordings),
        "num_pushed": fleet.num_pushed / VERSIONS,
    }
    figures = {key: row[key] for key in ("ratio_to_bound", "later_ratio_to_bound", "planner_cpu_s")}
    progress.done(case.name, figures)
    return row


def uplinks(case: SimulatedCase, seed: int) -> list[float]:
    """Uplinks of the nodes in bytes a second."""
    rng, count = Random(seed), case.num_nodes
    ups = [NODE_UP] * count
    if case.kind != "equal":
        low, high = UNEQUAL_UP
        ups = [low + (high - low) * number / (count - 1) for number in range(count)]
        rng.shuffle(ups)
    if case.kind == "some hand on nothing":
        for number in rng.sample(range(count), round(SILENT_SHARE * count)):
            ups[number] = SILENT_UP
    return [up * 1e6 / 8 for up in ups]


@dataclass(slots=True)
class Recording:
    """Calls of one planner, and its knowledge before them."""

    paths: Paths
    num_pieces: int
    piece_bytes: int
    asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def cpu_s(self) -> float:
        """Repeat the calls; return their processor seconds."""
        planner = Broadcast(paths=copy.deepcopy(self.paths), num_pieces=self.num_pieces, piece_bytes=self.piece_bytes)
        gc.collect()
        gc.freeze()  # Garbage collection must not look through the objects of the simulation.
        try:
            began_at = time.thread_time()
            for method, arguments, named in self.asked:
                getattr(planner, method)(*arguments, **named)
            return time.thread_time() - began_at
        finally:
            gc.unfreeze()


class _Recorded(Broadcast):
    """A planner that records its calls."""

    recording: Recording

    def join(self, node_id: str, *, hand_on: bool, now: float, have: Collection[int] = ()) -> None:
        self.recording.asked.append(("join", (node_id,), {"hand_on": hand_on, "now": now, "have": have}))
        super().join(node_id, hand_on=hand_on, now=now, have=have)

    def have(self, node_id: str, pieces: Any, now: float) -> None:
        self.recording.asked.append(("have", (node_id, pieces, now), {}))
        super().have(node_id, pieces, now)

    def plan(self, now: float) -> list[Send]:
        self.recording.asked.append(("plan", (now,), {}))
        return super().plan(now)


class SimulatedFleet:
    """A hub and its nodes, all linked as the hub says, on lines that carry nothing else."""

    def __init__(self, case: SimulatedCase, seed: int) -> None:
        ups = uplinks(case, seed)
        self._nodes = [_node(number, up) for number, up in enumerate(ups)]
        self._late = case.kind == "one joins late"
        self._agenda = Agenda()
        self._had: dict[int, set[str]] = {}
        self.recordings: list[Recording] = []
        hub_up, down = HUB_UP * 1e6 / 8, NODE_DOWN * 1e6 / 8
        self.bound_s = max(PAYLOAD_BYTES / hub_up, PAYLOAD_BYTES / down, len(ups) * PAYLOAD_BYTES / (hub_up + sum(ups)))
        self._spreading = Spreading(
            agenda=self._agenda,
            hub_uplink_bytes_s=hub_up,
            delay_s=DELAY_S,
            arrived=self._arrived,
            turned_away=lambda node: None,
            planner=self._planner,
        )

    @property
    def num_pushed(self) -> float:
        """Payload copies sent by the hub itself."""
        return self._spreading.bytes_pushed / PAYLOAD_BYTES

    @property
    def estimate_s(self) -> float:
        """Return the hub's estimate for a broadcast, with knowledge of all uplinks."""
        return self._spreading.estimates(PAYLOAD_BYTES, self._nodes)[Way.BROADCAST]

    def spread(self, version: int) -> float:
        """Announce a version; return the seconds until all nodes have it. A late node joins at `JOINS_AT` bounds."""
        began_at, cpu_at = self._agenda.now, time.thread_time()
        had = self._had[version] = set()
        late = self._nodes[-1] if self._late and version == 1 else None
        self._spreading.announce(version, PAYLOAD_BYTES, [node for node in self._nodes if node is not late])
        joins_at = began_at + JOINS_AT * self.bound_s
        while len(had) < len(self._nodes) and self._agenda.now < began_at + PATIENCE_S:
            if self._agenda.next_at == inf:  # A node uses another way.
                self._agenda.now = began_at + PATIENCE_S
                break
            if time.thread_time() - cpu_at > MOST_CPU_S:
                break
            if late is not None and self._agenda.next_at > joins_at:
                self._agenda.now = joins_at
                self._spreading.joined(late)
                late = None
            self._agenda.advance()
        return self._agenda.now - began_at

    def _planner(self, *, paths: Paths, num_pieces: int, piece_bytes: int) -> Broadcast:
        planner = _Recorded(paths=paths, num_pieces=num_pieces, piece_bytes=piece_bytes)
        planner.recording = Recording(copy.deepcopy(paths), num_pieces, piece_bytes)
        self.recordings.append(planner.recording)
        return planner

    def _arrived(self, node: SimulatedNode, version: int) -> None:
        self._had[version].add(node.node_id)


def _node(number: int, uplink_bytes_s: float) -> SimulatedNode:
    traits = Traits(
        width=1,
        capacity=1,
        s_per_token=1.0,
        prefill_s=0.0,
        fetch_s=0.0,
        phase=0.0,
        price_per_hour=0.0,
        uplink_bytes_s=uplink_bytes_s,
        downlink_bytes_s=NODE_DOWN * 1e6 / 8,
    )
    return SimulatedNode(f"node-{number}", number, traits)
