"""Time until a new version is on every node: with Echo, with HTTP from the hub to each node, and with libtorrent's
defaults, compared with the physical lower bound.

The payload is a version's carrier (its encrypted files). All compared ways send the same bytes, and the payload is
ready when the time begins. Echo's time ends when the last node may sample with the version: its pieces are checked,
decrypted and decoded, and every file is compared with the signed manifest. HTTP's time ends when the file's hash is
verified, libtorrent's when the last piece's hash is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.dissemination import rounds, simulated
from benchmarks.dissemination.links import can_shape, conditions, lacking, remove_leftovers
from benchmarks.dissemination.rounds import (
    HEADLINE_NODES,
    LARGE,
    MIDDLE,
    SMALL,
    USUAL_LOSS,
    Row,
    Side,
    measure_fleet,
    over_links,
    over_wan,
)
from benchmarks.dissemination.wan import homes
from benchmarks.dissemination.wan.homes import WanSet
from benchmarks.harness.progress import Measurement, Planned, Progress, least, most

DESCRIPTION: Final = "Time until all nodes have a new version: Echo, HTTP one-to-many, libtorrent's defaults, the bound"
GROWTH: Final = (4, 16)
SLOW_HUB: Final = 20
"""Uplink of the slow hub in Mbit/s. Its uplink alone sets the lower bound, which is then equal for any number of nodes.
So if the time grows with the number of nodes, the way of sending is the cause.
"""
SYMMETRIC: Final = WanSet(loss=0.0, routers=("symmetric",)).behind
PUBLISHED_DTYPE: Final = "bfloat16"
TOLERANCE: Final = 0.1
"""Tolerated relative difference between the size of a carrier (a version's encrypted files) and the requested size."""


def plan() -> list[Planned]:
    # Import late: this module loads torch, which the processes on the emulated hosts do not need.
    from benchmarks.dissemination import delta

    wan = [one for fleet in over_wan() for one in rounds.plan([fleet], homes.lacking(fleet.links))]
    return [*rounds.plan(over_links(), lacking()), *wan, *simulated.plan(), *delta.plan()]


def measure(seed: int, progress: Progress) -> Measurement:
    # Import late: this module loads torch, which the processes on the emulated hosts do not need.
    from benchmarks.dissemination import delta

    if can_shape():
        remove_leftovers()
    sent, far = (
        [row for fleet in fleets for row in asyncio.run(measure_fleet(fleet, seed, progress))]
        for fleets in (over_links(), over_wan())
    )
    virtual, deltas = simulated.measure(seed, progress), delta.measure(seed, progress)
    return Measurement(
        headline=headline(sent, deltas, virtual, far),
        rows=[*sent, *far, *virtual, *({"side": "delta", **row} for row in deltas)],
        conditions={"links": conditions() if can_shape() else lacking()},
    )


def headline(sent: Sequence[Row], deltas: Sequence[Row], virtual: Sequence[Row], far: Sequence[Row]) -> dict[str, Any]:
    """Return the main figures of the benchmark, each the worst over all link sets and models; None for figures that
    were not measured. The rows are of transfers over shaped links (`sent`), of sizes of deltas, of simulated fleets
    (`virtual`), and of transfers over the emulated network (`far`).
    """
    large, middle, small = (_of(sent, "echo", size, HEADLINE_NODES) for size in (LARGE, MIDDLE, SMALL))

    def slow_s(side: Side, size_bytes: int, num_nodes: int) -> float | None:
        rows = _of(sent, side, size_bytes, num_nodes)
        found: float | None = most([row for row in rows if row["hub_up_mbit_s"] == SLOW_HUB], "seconds")
        return found

    def delta_ratio(rate: float) -> Any:
        return most([row for row in deltas if (row["lr"], row["dtype"]) == (rate, PUBLISHED_DTYPE)], "delta_ratio")

    return {
        "ratio_to_bound_64MB_N8": most(large, "ratio_to_bound"),
        "ratio_to_bound_8MB_N8": most(middle, "ratio_to_bound"),
        "start_overhead_s": most(small, "over_bound_s"),
        "speedup_over_unicast": _ratio(slow_s("http", LARGE, HEADLINE_NODES), slow_s("echo", LARGE, HEADLINE_NODES)),
        "growth_N16_over_N4": _ratio(slow_s("echo", MIDDLE, GROWTH[1]), slow_s("echo", MIDDLE, GROWTH[0])),
        "delta_ratio_lr1e_5": delta_ratio(1e-5),
        "delta_ratio_lr1e_4": delta_ratio(1e-4),
        "delta_exact": all(row["exact"] for row in deltas) if deltas else None,
        **{
            f"ratio_N{num_nodes}": most([row for row in virtual if row["nodes"] == num_nodes], "ratio_to_bound")
            for num_nodes in simulated.NUM_NODES
        },
        **_wan(far),
        "planner_cpu_s_per_version": most(virtual, "planner_cpu_s"),
    }


def _wan(far: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of the emulated network, separately for three kinds of homes: open homes, homes behind routers
    that let two nodes connect to each other, and homes behind symmetric routers.
    """
    behind = [row for row in far if row["side"] == "echo" and "behind" in row]
    linking = [row for row in behind if row["behind"] != SYMMETRIC]
    middle = [row for row in _of(far, "echo", MIDDLE, HEADLINE_NODES) if "behind" not in row]
    return {
        "wan_ratio_8MB": most([row for row in middle if row["loss"] <= USUAL_LOSS], "ratio_to_bound"),
        "wan_ratio_8MB_lossy": most([row for row in middle if row["loss"] > USUAL_LOSS], "ratio_to_bound"),
        "wan_over_bound_s_0_5MB": most(_of(far, "echo", SMALL, HEADLINE_NODES), "over_bound_s"),
        "wan_emulator_cores": most(far, "emulator_cores"),
        "linked_share": least(linking, "linked_share"),
        "link_s": most(linking, "link_s"),
        "wan_ratio_8MB_behind": most(linking, "ratio_to_bound"),
        "hub_payloads_behind": most(linking, "hub_payloads"),
        "hub_bytes_symmetric": most([row for row in behind if row["behind"] == SYMMETRIC], "hub_payloads"),
    }


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _of(sent: Sequence[Row], side: Side, size_bytes: int, num_nodes: int) -> list[Row]:
    return [
        row
        for row in sent
        if (row["side"], row["nodes"]) == (side, num_nodes)
        and abs(row["payload_bytes"] - size_bytes) < TOLERANCE * size_bytes
    ]
