"""Links, fleets and payloads that are measured, and the number of repetitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.dissemination.links import LinkSet
from benchmarks.dissemination.wan.homes import WanSet
from benchmarks.harness.progress import Planned, Progress

Side = Literal["http", "libtorrent", "echo", "echo swarm"]
"""The compared ways to send. `echo`: the hub chooses how its pieces travel. `echo swarm`: only through the swarm
(BitTorrent).
"""

LINK_SETS: Final = tuple(
    LinkSet(hub_up=hub_up, node_down=100, node_up=node_up) for hub_up in (20, 100) for node_up in (20, 40)
)
SMALL, MIDDLE, LARGE = 500_000, 8_000_000, 64_000_000
"""Bytes of the payloads."""
REPEATS_S: Final = 180.0
"""Seconds after which a case is not repeated once more."""
START_S: Final = 4.0
"""Expected seconds until a fleet of eight nodes has started."""
NUM_NODES: Final = (4, 8, 16)
LOSSES: Final = (0.0, 0.002, 0.01)
"""Shares of lost packets on the emulated wide-area network."""
HEADLINE_NODES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One payload on one fleet. Every side sends it `repeats` times; the sides take turns."""

    size_bytes: int
    sides: tuple[Side, ...]
    repeats: int = 1
    """Repetitions; fewer if they take longer than REPEATS_S."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCases:
    """Cases that are measured on one fleet, one after the other."""

    links: LinkSet | WanSet
    num_nodes: int
    cases: tuple[Case, ...]

    def name(self, case: Case) -> str:
        return f"{case.size_bytes / 1e6:g} MB to {self.num_nodes} nodes, {self.links.name}"

    def wanted(self, progress: Progress) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if progress.wants(self.name(case)))


def plan(fleets: Sequence[FleetCases], lacks: str = "") -> list[Planned]:
    return [
        Planned(name=fleet.name(case), seconds=_seconds(fleet, case), lacks=lacks)
        for fleet in fleets
        for case in fleet.cases
    ]


def _seconds(fleet: FleetCases, case: Case) -> float:
    """Return the expected seconds of the case, from the lower bound and the time of HTTP."""
    bound_s = fleet.links.bound_s(case.size_bytes, fleet.num_nodes)
    unicast_s = fleet.num_nodes * case.size_bytes * 8e-6 / fleet.links.hub_up
    sides_s = sum(unicast_s if side == "http" else 1.3 * bound_s + 0.5 for side in case.sides)
    return case.repeats * sides_s + START_S * fleet.num_nodes / HEADLINE_NODES


def over_links() -> list[FleetCases]:
    """Return the cases on fleets of equal homes, over shaped links."""
    return [
        FleetCases(links=links, num_nodes=num_nodes, cases=tuple(_cases(links, num_nodes)))
        for num_nodes in NUM_NODES
        for links in LINK_SETS
    ]


def over_wan() -> list[FleetCases]:
    """Return the cases on fleets of unequal homes, with delay and loss."""
    sides: tuple[Side, ...] = ("http", "libtorrent", "echo")
    cases = tuple(Case(size_bytes=size, sides=sides, repeats=3) for size in (MIDDLE, SMALL))
    return [FleetCases(links=WanSet(loss=loss), num_nodes=HEADLINE_NODES, cases=cases) for loss in LOSSES]


def _cases(links: LinkSet, num_nodes: int) -> Iterator[Case]:
    """Measure unicast of larger payloads, which takes minutes, with 8 nodes on one link set of each hub uplink: the
    nodes' uplinks do not matter to it. Measure libtorrent with the largest payload on two link sets."""
    if num_nodes != HEADLINE_NODES:
        yield Case(size_bytes=SMALL, sides=("libtorrent", "echo"), repeats=3)
        yield Case(size_bytes=MIDDLE, sides=("libtorrent", "echo"))
        return
    unicast: tuple[Side, ...] = ("http",) if links.node_up == LINK_SETS[0].node_up else ()
    others: tuple[Side, ...] = ("libtorrent", "echo swarm") if links in (LINK_SETS[0], LINK_SETS[-1]) else ()
    yield Case(size_bytes=SMALL, sides=("http", "libtorrent", "echo", "echo swarm"), repeats=3)
    yield Case(size_bytes=MIDDLE, sides=(*unicast, "libtorrent", "echo", "echo swarm"), repeats=2)
    yield Case(size_bytes=LARGE, sides=(*unicast, *others, "echo"))
