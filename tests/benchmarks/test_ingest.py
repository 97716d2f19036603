"""Headline figures are taken from the rows of their cases; a case that was left out gives no figure."""

from __future__ import annotations

from typing import Any

from benchmarks import ingest
from benchmarks.ingest.cases import FRAMES


def row(nodes: int, frame_bytes: int, *, gateways: int = 0, server: bool = False, **figures: float) -> dict[str, Any]:
    known = {
        "cpu_ratio_to_echo": 0.5,
        "scored_over_acked": 1.0,
        "half_load_p99_ms": 10.0,
        "lost": 0,
        "bytes_per_connection": 30_000.0,
    }
    return {"nodes": nodes, "gateways": gateways, "server": server, "frame_bytes": frame_bytes, **known, **figures}


def test_the_ratio_is_of_a_thousand_nodes_and_the_others_are_the_worst() -> None:
    small, large = FRAMES
    rows = [
        row(10, small, cpu_ratio_to_echo=0.1, bytes_per_connection=1e6, half_load_p99_ms=80.0, lost=1),
        row(10, large, lost=1),
        row(1_000, small, cpu_ratio_to_echo=0.3, scored_over_acked=0.96, lost=2),
        row(1_000, large, cpu_ratio_to_echo=0.2, scored_over_acked=0.9, lost=2),
        row(3_000, small, bytes_per_connection=40_000.0),
        row(1_000, small, server=True, cpu_ratio_to_echo=0.42),
        row(1_000, small, gateways=1, cpu_ratio_to_echo=0.45),
        row(100, small, gateways=2, cpu_ratio_to_echo=0.4),
        row(100, large, gateways=2, cpu_ratio_to_echo=0.1),
    ]
    assert ingest.headline(rows) == {
        "cpu_ratio_to_echo_1000": 0.3,
        "cpu_ratio_to_echo_1000_postgresql": 0.42,
        "cpu_ratio_hub_with_gateways": 0.4,
        "scored_over_acked": 0.9,
        "p99_ack_ms_half_load": 80.0,
        "lost": 3,
        "bytes_per_connection": 40_000.0,
    }


def test_unmeasured_cases_have_no_figure() -> None:
    assert ingest.headline([]) == {
        "cpu_ratio_to_echo_1000": None,
        "cpu_ratio_to_echo_1000_postgresql": None,
        "cpu_ratio_hub_with_gateways": None,
        "scored_over_acked": None,
        "p99_ack_ms_half_load": None,
        "lost": 0,
        "bytes_per_connection": None,
    }
