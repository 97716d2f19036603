"""The ingest benchmark's hub and echo server, with few nodes and for a short time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.broker import lacking
from benchmarks.ingest import running
from benchmarks.ingest.cases import FRAMES, Case
from benchmarks.ingest.lender import Counts
from benchmarks.ingest.running import Window


def test_a_window_reports_each_rollout() -> None:
    counts = Counts(acked=4, waits_s=[0.1, 0.2, 0.3, 0.4])
    window = Window(seconds=2.0, counts=counts, hub_s=0.002)
    assert window.us_each(window.hub_s) == pytest.approx(500)
    assert window.wait_ms(50) == pytest.approx(250)


def test_the_echo_server_returns_every_frame_and_its_processor_time_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SETTLE_S", 0.1)
    monkeypatch.setattr(running, "ECHO_S", 0.3)
    windows = running._echo(Case(nodes=3), tmp_path / "echo.log", seed=1)
    assert list(windows) == list(FRAMES)
    for window in windows.values():
        assert window.counts.acked == len(window.counts.waits_s) > 0
        assert window.hub_s > 0


@pytest.mark.slow
@pytest.mark.skipif(bool(lacking()), reason=lacking())
def test_a_hub_and_a_gateway_killed_in_mid_stream_have_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("WARM_UP_S", 2.0), ("SETTLE_S", 0.5), ("WINDOW_S", 1.5), ("ECHO_S", 0.3)):
        monkeypatch.setattr(running, name, seconds)
    rows = running.run(Case(nodes=6, gateways=2), tmp_path, seed=0)
    for row in rows:
        assert (row["lost"], row["connections_ended"]) == (0, 0)
        assert row["acked_per_s"] > 0 and row["gateways_us"] > 0


@pytest.mark.slow
def test_a_hub_is_measured_and_has_lost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("WARM_UP_S", 2.0), ("SETTLE_S", 0.5), ("WINDOW_S", 1.5), ("ECHO_S", 0.3)):
        monkeypatch.setattr(running, name, seconds)
    rows = running.run(Case(nodes=4), tmp_path, seed=0)
    assert [row["frame_bytes"] for row in rows] == list(FRAMES)
    for row in rows:
        assert (row["lost"], row["connections_ended"]) == (0, 0)
        assert row["acked_per_s"] > 0 and row["scored_over_acked"] > 0
        assert 0 < row["cpu_ratio_to_echo"] < 1
        assert row["half_load_p99_ms"] > 0 and row["bytes_per_connection"] > 0
