"""The hub's cost of a rollout from a node's frame to its receipts, and the number of nodes that one hub holds.

One process runs the hub with store, scorers and admission. Hand-made nodes, which draw nothing, have other processes. A
bare echo of the same frames is the yardstick: the cost of the event loop and of the websocket library alone. Costs are
processor time by process, so that a busy machine changes them little. Each case ends by killing the hub and looking up
every acked rollout in the database. If gateways hold the connections, one gateway is killed at the same moment, and the
hub is started again to read the rest from the broker.

The processes are modules of this package, so it imports nothing heavy."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.measurement import Measurement
from benchmarks.harness.progress import Planned, Progress
from benchmarks.ingest.cases import CASES, FRAMES

DESCRIPTION: Final = (
    "Rollouts that many nodes send one hub: processor time of the hub beside that of a bare websocket echo of the same "
    "frames, rollouts acked and scored a second when all send what they can, the time to the ack at half of that, "
    "memory a connection, and what a killed hub has lost of what it had acked"
)
SHOWN: Final = (
    "case",
    "frame_bytes",
    "acked_per_s",
    "scored_over_acked",
    "hub_us",
    "scorers_us",
    "echo_us",
    "cpu_ratio_to_echo",
    "half_load_p50_ms",
    "half_load_p99_ms",
    "lost",
)
RATIO_NODES: Final = 1_000
"""Nodes of the headline's ratio."""


def plan() -> list[Planned]:
    return [Planned(name=case.name, seconds=case.seconds, lacks=case.lacks) for case in CASES]


def measure(seed: int, progress: Progress) -> Measurement:
    """Measure all wanted cases.

    `cpu_ratio_to_echo_1000` is the echo's processor time of a frame over the hub's processor time of a rollout, with
    1,000 nodes and frames of 2 KB; `..._postgresql` excludes the database server's time. `cpu_ratio_hub_with_gateways`
    is the worst case with gateways and excludes the time of gateways and broker. The other figures are the worst of all
    cases: `scored_over_acked` at full load, `p99_ack_ms_half_load` at half of the rate of full load, `lost` as a sum.
    """
    from benchmarks.ingest.running import run

    rows: list[dict[str, Any]] = []
    for case in CASES:
        if not progress.wants(case.name):
            continue
        with tempfile.TemporaryDirectory(prefix="echo-ingest-") as directory:
            rows += run(case, Path(directory), seed=seed)
        progress.so_far = Measurement(headline=headline(rows), rows=rows, shown=SHOWN)
        told = rows[-len(FRAMES)]
        progress.done(case.name, {key: told[key] for key in SHOWN[2:]})
    return Measurement(headline=headline(rows), rows=rows, shown=SHOWN)


def headline(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Headline figures of the measured cases."""
    small = [row for row in rows if row["frame_bytes"] == FRAMES[0]]
    of_ratio = [row for row in small if row["nodes"] == RATIO_NODES and not row["gateways"] and not row["server"]]
    of_server = [row for row in small if row["nodes"] == RATIO_NODES and row["server"]]
    behind_gateways = [row["cpu_ratio_to_echo"] for row in small if row["gateways"]]
    of_connections = [row["bytes_per_connection"] for row in rows if row["nodes"] >= RATIO_NODES]
    return {
        f"cpu_ratio_to_echo_{RATIO_NODES}": next((row["cpu_ratio_to_echo"] for row in of_ratio), None),
        f"cpu_ratio_to_echo_{RATIO_NODES}_postgresql": next((row["cpu_ratio_to_echo"] for row in of_server), None),
        "cpu_ratio_hub_with_gateways": min(behind_gateways, default=None),
        "scored_over_acked": min((row["scored_over_acked"] for row in rows), default=None),
        "p99_ack_ms_half_load": max((row["half_load_p99_ms"] for row in rows), default=None),
        "lost": sum(row["lost"] for row in small),
        "bytes_per_connection": max(of_connections, default=None),
    }
