"""The growth benchmark on a hub with a small store, from its start to its end."""

from __future__ import annotations

import pytest

from benchmarks import growth
from benchmarks.harness.postgresql import lacking
from benchmarks.harness.progress import Progress


def test_headlines_are_by_nodes_and_none_without_their_case() -> None:
    rows = [{"case": "1,000 nodes", "snapshot_ms": 20.0}]
    told = growth.headline(rows)
    assert (told["snapshot_ms_1000"], told["snapshot_ms_10000"]) == (20.0, None)
    assert {
        "worst_query_ms_1000",
        "bytes_per_rollout_10000",
        "start_s_1000_postgresql",
        "worst_query_ms_10000_postgresql",
    } <= told.keys()


def test_postgresql_is_left_out_if_there_is_no_server() -> None:
    lacks = {case.name: case.lacks for case in growth.plan()}
    assert lacks["1,000 nodes, PostgreSQL"] == lacking() and not lacks["1,000 nodes"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hub_starts_with_a_filled_store_and_all_figures_are_measured() -> None:
    progress = Progress(growth.plan(), ["1,000 nodes"])
    (run,) = growth.measure_scaled(0, progress, 0.005).rows
    assert run["nodes"] == 20 and run["start_s"] > 0 and run["bytes_per_rollout"] > 100
    assert all(run[name] > 0 for name in ("snapshot_ms", "leaderboard_ms", "metrics_ms", "worst_query_ms"))
    assert run["worst_query"]
