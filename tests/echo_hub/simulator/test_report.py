"""Figures of a run in the small world, computed by hand: a step of 5 s begins every 7.7 s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from echo_hub.simulator.report import SimulationReport, table
from echo_hub.simulator.world import World

Simulated = Callable[..., tuple[World, SimulationReport]]
WAITING = {"training": {"max_staleness": 0}}


def test_the_warm_up_does_not_count(simulated: Simulated) -> None:
    for warm_up in (0, 1, 4):
        world, report = simulated(**WAITING, measuring={"warm_up_steps": warm_up})
        since = world.steps[warm_up - 1][1] if warm_up else 0.0
        counted_s = world.steps[-1][1] - since
        assert report.utilisation == pytest.approx((8 - warm_up) * 5 / counted_s)
        assert report.idle_s == pytest.approx(counted_s - (8 - warm_up) * 5)


def test_an_aborted_run_counts_to_its_end(simulated: Simulated) -> None:
    """Steps begin at 2.15 s and then every 7.7 s, so the run ends at 21 s in the second half of the third step. That
    part of a step counts as well.
    """
    _, report = simulated(**WAITING, measuring={"limit_s": 21.0, "warm_up_steps": 1})
    assert (report.finished, report.steps, report.virtual_s) == (False, 2, 21.0)
    begins = [2.15 + number * 7.7 for number in range(3)]
    assert report.utilisation == pytest.approx((5 + 21 - begins[2]) / (21 - begins[0] - 5), abs=0.01)
    assert report.balanced


def test_shares_sizes_and_percentiles(simulated: Simulated) -> None:
    world, report = simulated(nodes={"count": 3}, training={"groups_per_step": 2})
    trained = sorted(world.accounts.trained_of[number] for number in range(3))
    assert sum(trained) == report.trained == 32
    assert report.trained_by_node[1] == trained[1]
    assert report.idle_nodes_share == trained.count(0) / 3
    assert 1 <= report.mean_lease <= 2
    assert report.stale_share == sum(report.dropped.get(reason, 0) for reason in ("stale", "revoked")) / report.leased


def test_rented_nodes_that_all_work_cost_what_they_are_connected(simulated: Simulated) -> None:
    all_work = {"choose": False}
    _, report = simulated(nodes={"rented_share": 1.0, "price_per_hour": 36.0}, prices=all_work)
    assert report.cost == pytest.approx(0.01 * report.virtual_s)
    _, half = simulated(
        nodes={"rented_share": 1.0, "price_per_hour": 36.0},
        availability={"on_share": 0.5, "day_s": 20.0},
        measuring={"limit_s": 400.0},
        prices=all_work,
    )
    assert half.cost == pytest.approx(0.005 * half.virtual_s, abs=0.1)


def test_the_identity_is_judged(simulated: Simulated) -> None:
    _, report = simulated()
    assert report.balanced and not replace(report, leased=report.leased + 1).balanced


def test_the_table_shows_the_figures(simulated: Simulated) -> None:
    _, report = simulated(**WAITING)
    told = dict(table(report))
    assert told["Steps"].startswith("8 in ") and told["  trained"] == "16" and told["  dropped"] == "none"
    assert told["Mean staleness"] == "0.00; needed -"
    _, given_up = simulated(measuring={"limit_s": 10.0})
    assert "not finished" in dict(table(given_up))["Steps"]
