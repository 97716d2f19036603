"""Time until a new version is on every node: Echo, HTTP one-to-many and libtorrent's defaults, and the physical bound.

The payload is a policy version's carrier, with the same bytes for all sides; it is ready when the time begins. Echo's
time ends when the last node may sample from the version: pieces are checked, unsealed and decoded, and every file is
compared with the signed manifest. HTTP's time ends with a hash over the file, libtorrent's with the hash of the last
piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.dissemination import cases, faults, simulated
from benchmarks.dissemination.cases import FleetCases, beside, in_turns, over_wan
from benchmarks.dissemination.headline import PUBLISHED_DTYPE, SLOW_HUB, headline
from benchmarks.dissemination.links import can_shape, conditions, remove_leftovers
from benchmarks.dissemination.rounds import Row, measure_fleet
from benchmarks.dissemination.wan import homes
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.progress import Planned, Progress

DESCRIPTION: Final = "Time until all nodes have a new version: Echo, HTTP one-to-many, libtorrent's defaults, the bound"


def plan() -> list[Planned]:
    from benchmarks.dissemination import delta  # It loads torch, which hosts' processes do without.

    lacks = "" if homes.can_emulate() else "an emulated network: root's rights, iproute2, and TUN devices"
    return [
        *cases.plan([*in_turns(), *beside()]),
        *cases.plan(over_wan(), lacks),
        *faults.plan(),
        *simulated.plan(),
        *delta.plan(),
    ]


def measure(seed: int, progress: Progress) -> Measurement:
    from benchmarks.dissemination import delta  # It loads torch, which hosts' processes do without.

    if can_shape():
        remove_leftovers()
    sent = asyncio.run(_send(seed, progress))
    far = asyncio.run(_in_turns(over_wan(), seed, progress))
    tried = asyncio.run(faults.try_all(seed, progress))
    virtual = simulated.measure(seed, progress)
    deltas = delta.measure(seed, progress)
    return Measurement(
        headline=headline(sent, deltas, tried, virtual, far),
        rows=[
            *sent,
            *far,
            *virtual,
            *({"side": "delta", **row} for row in deltas),
            *({"side": "fault", **row} for row in tried),
        ],
        conditions=_conditions(),
    )


async def _send(seed: int, progress: Progress) -> list[Row]:
    async with asyncio.TaskGroup() as tasks:
        slow = tasks.create_task(_in_turns(beside(), seed, progress))
        others = tasks.create_task(_in_turns(in_turns(), seed, progress))
    return others.result() + slow.result()


async def _in_turns(fleets: Sequence[FleetCases], seed: int, progress: Progress) -> list[Row]:
    return [row for fleet in fleets for row in await measure_fleet(fleet, seed, progress)]


def _conditions() -> dict[str, Any]:
    return {
        "links": conditions(),
        "wan": homes.conditions(),
        "hosts": "one process each, all on this machine's cores; nodes are joined, and stay from version to version",
        "http": f"the nodes' uplinks are of no consequence to it: larger payloads on one link set a hub uplink; with "
        f"{SLOW_HUB} Mbit/s they are measured in links of their own, beside the other sides",
        "libtorrent": "default settings, but for DHT, LSD, UPnP and NAT-PMP off; all peers are told at once; "
        "stuck_nodes had nothing after a long while, which then counts as its time",
        "echo": "the way is the hub's choice; 'echo swarm': pinned to the swarm",
        "seconds": "median of the runs, from the announcement until the last node has verified it",
        "pushed, mesh, swarm, web_seed": "bytes that came to the nodes that way, over the payload; of the first run",
        "busy_cores": "processor time of the hub's and all nodes' processes, over the time they took",
        "growth": f"8 MB, the slower of the link sets whose hub has {SLOW_HUB} Mbit/s",
        "delta_ratio": f"{PUBLISHED_DTYPE}, one step on, the worse of the models",
        "simulated": f"virtual time; hub {simulated.HUB_UP:g} Mbit/s, nodes {simulated.NODE_UP:g} or, not equal, "
        f"{simulated.UNEQUAL_UP[0]:g} to {simulated.UNEQUAL_UP[1]:g} up, {simulated.NODE_DOWN:g} down, "
        f"{simulated.DELAY_S * 1e3:g} ms one way; the first version, of which the hub knows no uplink",
        "ratio_N64, ratio_N256, ratio_N1024": "the worse of equal and unequal uplinks",
        "faults": faults.CONDITIONS if can_shape() else "none tried: they take shaped links",
    }
