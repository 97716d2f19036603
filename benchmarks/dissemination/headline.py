"""Headline figures of all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks.dissemination.cases import HEADLINE_NODES, LARGE, MIDDLE, SMALL, Side
from benchmarks.dissemination.rounds import Row
from benchmarks.dissemination.simulated import HEADLINE_KINDS, NUM_NODES

GROWTH: Final = (4, 16)
"""Numbers of nodes that are compared."""
SLOW_HUB: Final = 20
"""Uplink of the slow hub in Mbit/s. Its bound does not grow with the nodes, so growth shows the scheme alone."""
USUAL_LOSS: Final = 0.002
"""Share of packets that a usual home link may lose."""
PUBLISHED_DTYPE: Final = "bfloat16"
TOLERANCE: Final = 0.1
"""Relative difference between a carrier and the requested payload."""


def headline(
    sent: Sequence[Row], deltas: Sequence[Row], tried: Sequence[Row], virtual: Sequence[Row], far: Sequence[Row]
) -> dict[str, Any]:
    """Return the worst of all link sets and models. None: not measured. `far` are rows of the emulated network."""
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
        "faults_tried": len(tried),
        "faults_survived": sum(row["survived"] for row in tried),
        **{f"ratio_N{num_nodes}": _simulated_ratio(virtual, num_nodes) for num_nodes in NUM_NODES},
        **_wan(far),
        "planner_cpu_s_per_version": max((float(row["planner_cpu_s"]) for row in virtual), default=None),
    }


def _wan(far: Sequence[Row]) -> dict[str, float | None]:
    """Return the worst of each group of losses, and the emulator's worst of all."""
    middle, small = (list(_of(far, "echo", size, HEADLINE_NODES)) for size in (MIDDLE, SMALL))
    usual = [row["ratio_to_bound"] for row in middle if row["loss"] <= USUAL_LOSS]
    lossy = [row["ratio_to_bound"] for row in middle if row["loss"] > USUAL_LOSS]
    return {
        "wan_ratio_8MB": max(usual, default=None),
        "wan_ratio_8MB_lossy": max(lossy, default=None),
        "wan_over_bound_s_0_5MB": max((row["over_bound_s"] for row in small), default=None),
        "wan_emulator_cores": max((row["emulator_cores"] for row in far), default=None),
    }


def _simulated_ratio(virtual: Sequence[Row], num_nodes: int) -> float | None:
    ratios = [row["ratio_to_bound"] for row in virtual if row["nodes"] == num_nodes and row["kind"] in HEADLINE_KINDS]
    return max(ratios, default=None)


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _of(sent: Sequence[Row], side: Side, size_bytes: int, num_nodes: int) -> Iterator[Row]:
    for row in sent:
        is_size = abs(row["payload_bytes"] - size_bytes) < TOLERANCE * size_bytes
        if row["side"] == side and row["nodes"] == num_nodes and is_size:
            yield row


def _slow(sent: Sequence[Row], side: Side, size_bytes: int, num_nodes: int) -> float | None:
    """Return the slowest time over the links of the slow hub."""
    rows = [row for row in _of(sent, side, size_bytes, num_nodes) if row["hub_up_mbit_s"] == SLOW_HUB]
    return max((float(row["seconds"]) for row in rows), default=None)


def _delta_ratio(deltas: Sequence[Row], rate: float) -> float | None:
    """Delta ratio of the published dtype, one step on."""
    ratios = [
        float(row["delta_ratio"])
        for row in deltas
        if (row["lr"], row["ahead"], row["dtype"]) == (rate, 1, PUBLISHED_DTYPE)
    ]
    return max(ratios, default=None)
