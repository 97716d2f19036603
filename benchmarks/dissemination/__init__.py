"""Time until a new version is on every node: Echo, HTTP one-to-many and libtorrent's defaults, and the physical bound.

The payload is a policy version's carrier, with the same bytes for all sides; it is ready when the time begins. Echo's
time ends when the last node may sample from the version: pieces are checked, unsealed and decoded, and every file is
compared with the signed manifest. HTTP's time ends with a hash over the file, libtorrent's with the hash of the last
piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks.dissemination import rounds, simulated
from benchmarks.dissemination.links import can_shape, conditions, lacking, remove_leftovers
from benchmarks.dissemination.rounds import (
    HEADLINE_NODES,
    LARGE,
    MIDDLE,
    SMALL,
    USUAL_LOSS,
    FleetCases,
    Row,
    Side,
    measure_fleet,
    over_links,
    over_wan,
)
from benchmarks.dissemination.wan import homes
from benchmarks.dissemination.wan.homes import WanSet
from benchmarks.harness.progress import Measurement, Planned, Progress

DESCRIPTION: Final = "Time until all nodes have a new version: Echo, HTTP one-to-many, libtorrent's defaults, the bound"
GROWTH: Final = (4, 16)
SLOW_HUB: Final = 20
"""Uplink of the slow hub in Mbit/s. Its uplink alone sets the lower bound, which is then equal for any number of nodes:
if the time grows with the number of nodes, the way of sending is the cause.
"""
SYMMETRIC: Final = WanSet(loss=0.0, routers=("symmetric",)).behind
PUBLISHED_DTYPE: Final = "bfloat16"
TOLERANCE: Final = 0.1
"""Tolerated relative difference between the size of a carrier (a version's encrypted files) and the requested size."""


def plan() -> list[Planned]:
    # Import late: this module loads torch, which the processes of the hosts do not need.
    from benchmarks.dissemination import delta

    wan = [one for fleet in over_wan() for one in rounds.plan([fleet], homes.lacking(fleet.links))]
    return [*rounds.plan(over_links(), lacking()), *wan, *simulated.plan(), *delta.plan()]


def measure(seed: int, progress: Progress) -> Measurement:
    # Import late: this module loads torch, which the processes of the hosts do not need.
    from benchmarks.dissemination import delta

    if can_shape():
        remove_leftovers()
    sent = asyncio.run(_measure(over_links(), seed, progress))
    far = asyncio.run(_measure(over_wan(), seed, progress))
    virtual = simulated.measure(seed, progress)
    deltas = delta.measure(seed, progress)
    return Measurement(
        headline=headline(sent, deltas, virtual, far),
        rows=[*sent, *far, *virtual, *({"side": "delta", **row} for row in deltas)],
        conditions={
            "links": conditions() if can_shape() else lacking(),
            "wan": homes.conditions(),
            "http": "larger payloads on one link set for each hub uplink: the nodes' uplinks do not matter to it",
            "libtorrent": "default settings, but for DHT, LSD, UPnP and NAT-PMP off; all peers are told at once; "
            "stuck_nodes had nothing after a long while, which then counts as its time",
            "simulated": f"virtual time; hub {simulated.HUB_UP:g} Mbit/s, nodes {simulated.NODE_UP:g} or, not equal, "
            f"{simulated.UNEQUAL_UP[0]:g} to {simulated.UNEQUAL_UP[1]:g} up, {simulated.NODE_DOWN:g} down, "
            f"{simulated.DELAY_S * 1e3:g} ms one way; the first version, of which the hub knows no uplink",
        },
    )


async def _measure(fleets: Sequence[FleetCases], seed: int, progress: Progress) -> list[Row]:
    return [row for fleet in fleets for row in await measure_fleet(fleet, seed, progress)]


def headline(sent: Sequence[Row], deltas: Sequence[Row], virtual: Sequence[Row], far: Sequence[Row]) -> dict[str, Any]:
    """Return the worst figure over all link sets and models; None if not measured. `far` has the rows of the emulated
    network.
    """
    large, middle, small = (list(_of(sent, "echo", size, HEADLINE_NODES)) for size in (LARGE, MIDDLE, SMALL))
    return {
        "ratio_to_bound_64MB_N8": max((row["ratio_to_bound"] for row in large), default=None),
        "ratio_to_bound_8MB_N8": max((row["ratio_to_bound"] for row in middle), default=None),
        "start_overhead_s": max((row["over_bound_s"] for row in small), default=None),
        "speedup_over_unicast": _ratio(
            _slow(sent, "http", LARGE, HEADLINE_NODES), _slow(sent, "echo", LARGE, HEADLINE_NODES)
        ),
        "growth_N16_over_N4": _ratio(_slow(sent, "echo", MIDDLE, GROWTH[1]), _slow(sent, "echo", MIDDLE, GROWTH[0])),
        "delta_ratio_lr1e_5": _delta_ratio(deltas, 1e-5),
        "delta_ratio_lr1e_4": _delta_ratio(deltas, 1e-4),
        "delta_exact": all(row["exact"] for row in deltas) if deltas else None,
        **{f"ratio_N{num_nodes}": _simulated_ratio(virtual, num_nodes) for num_nodes in simulated.NUM_NODES},
        **_wan(far),
        **_behind(far),
        "planner_cpu_s_per_version": max((float(row["planner_cpu_s"]) for row in virtual), default=None),
    }


def _wan(far: Sequence[Row]) -> dict[str, float | None]:
    """Return figures of the emulated network: the worst ratio to the lower bound up to the usual packet loss and above
    it, the worst delay of small versions, and the emulator's largest use of processor cores.
    """
    middle, small = (list(_of(far, "echo", size, HEADLINE_NODES)) for size in (MIDDLE, SMALL))
    middle = [row for row in middle if "behind" not in row]
    usual = [row["ratio_to_bound"] for row in middle if row["loss"] <= USUAL_LOSS]
    lossy = [row["ratio_to_bound"] for row in middle if row["loss"] > USUAL_LOSS]
    return {
        "wan_ratio_8MB": max(usual, default=None),
        "wan_ratio_8MB_lossy": max(lossy, default=None),
        "wan_over_bound_s_0_5MB": max((row["over_bound_s"] for row in small), default=None),
        "wan_emulator_cores": max((row["emulator_cores"] for row in far), default=None),
    }


def _behind(far: Sequence[Row]) -> dict[str, float | None]:
    """Return the worst figures of homes behind routers that let two nodes connect to each other, and the hub's bytes,
    in payloads, where the routers do not.
    """
    rows = [row for row in far if row["side"] == "echo" and "behind" in row]
    symmetric = [row for row in rows if row["behind"] == SYMMETRIC]
    other = [row for row in rows if row["behind"] != SYMMETRIC]
    return {
        "linked_share": min((row["linked_share"] for row in other), default=None),
        "link_s": max((row["link_s"] for row in other), default=None),
        "wan_ratio_8MB_behind": max((row["ratio_to_bound"] for row in other), default=None),
        "hub_payloads_behind": max((row["hub_payloads"] for row in other), default=None),
        "hub_bytes_symmetric": max((row["hub_payloads"] for row in symmetric), default=None),
    }


def _simulated_ratio(virtual: Sequence[Row], num_nodes: int) -> float | None:
    ratios = [row["ratio_to_bound"] for row in virtual if row["nodes"] == num_nodes]
    return max(ratios, default=None)


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _of(sent: Sequence[Row], side: Side, size_bytes: int, num_nodes: int) -> Iterator[Row]:
    for row in sent:
        is_size = abs(row["payload_bytes"] - size_bytes) < TOLERANCE * size_bytes
        if row["side"] == side and row["nodes"] == num_nodes and is_size:
            yield row


def _slow(sent: Sequence[Row], side: Side, size_bytes: int, num_nodes: int) -> float | None:
    rows = [row for row in _of(sent, side, size_bytes, num_nodes) if row["hub_up_mbit_s"] == SLOW_HUB]
    return max((float(row["seconds"]) for row in rows), default=None)


def _delta_ratio(deltas: Sequence[Row], rate: float) -> float | None:
    """Return the size of the delta over that of the raw adapter, for the dtype that hubs publish."""
    ratios = [float(row["delta_ratio"]) for row in deltas if (row["lr"], row["dtype"]) == (rate, PUBLISHED_DTYPE)]
    return max(ratios, default=None)
