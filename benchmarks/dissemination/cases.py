"""Which links, fleets and payloads are measured, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.dissemination.links import LinkSet

Side = Literal["http", "libtorrent", "echo", "echo swarm"]
"""`echo`: as it comes, the hub chooses the way. `echo swarm`: the same, its way pinned to the swarm."""

LINK_SETS: Final = tuple(
    LinkSet(hub_up=hub_up, node_down=100, node_up=node_up) for hub_up in (20, 100) for node_up in (20, 40)
)
FAST_HUB: Final = LINK_SETS[2]
SMALL, MIDDLE, LARGE = 500_000, 8_000_000, 64_000_000
"""Payload bytes."""
NUM_NODES: Final = (2, 4, 8, 16)
HEADLINE_NODES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One payload on one fleet: every side sends it `repeats` times, in turns."""

    size_bytes: int
    sides: tuple[Side, ...]
    repeats: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCases:
    """What is measured on one fleet, one after the other; the fleet stands all the time."""

    links: LinkSet
    num_nodes: int
    cases: tuple[Case, ...]


def in_turns() -> list[FleetCases]:
    """Those measured one after the other."""
    return [
        FleetCases(links=links, num_nodes=num_nodes, cases=tuple(_cases(links, num_nodes)))
        for num_nodes in NUM_NODES
        for links in LINK_SETS
    ]


def beside() -> list[FleetCases]:
    """The slow hub's unicast takes minutes in which machine and links idle: it is measured beside all others."""
    fleets = []
    for num_nodes in NUM_NODES:
        sizes = (MIDDLE, LARGE) if num_nodes == HEADLINE_NODES else (MIDDLE,)
        cases = tuple(Case(size_bytes=size, sides=("http",)) for size in sizes)
        fleets.append(FleetCases(links=LINK_SETS[0], num_nodes=num_nodes, cases=cases))
    return fleets


def _cases(links: LinkSet, num_nodes: int) -> Iterator[Case]:
    """Unicast of the larger payloads on the first link set of each hub uplink alone: the nodes' uplinks are of no
    consequence to it. The largest payload on one fleet, and where libtorrent takes longest on two link sets."""
    is_headline = num_nodes == HEADLINE_NODES
    pinned: tuple[Side, ...] = ("echo swarm",) if is_headline else ()
    unicast: tuple[Side, ...] = ("http",) if links == FAST_HUB else ()
    yield Case(size_bytes=SMALL, sides=("http", "libtorrent", "echo", *pinned), repeats=3)
    yield Case(size_bytes=MIDDLE, sides=(*unicast, "libtorrent", "echo", *pinned), repeats=2 if is_headline else 1)
    if is_headline:
        others: tuple[Side, ...] = ("libtorrent", *pinned) if links in (LINK_SETS[0], LINK_SETS[-1]) else ()
        yield Case(size_bytes=LARGE, sides=(*unicast, *others, "echo"))
