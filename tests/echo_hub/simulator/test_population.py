"""Properties of simulated nodes follow from the seed; the time to send a version follows from a formula."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from statistics import fmean, pstdev

import pytest

from echo_hub.simulator.population import draw_nodes, fetch_s, liar
from echo_hub.simulator.scenario import Scenario

ScenarioOf = Callable[..., Scenario]


def test_nodes_without_sigma_are_alike(scenario_of: ScenarioOf) -> None:
    one, other = draw_nodes(scenario_of(nodes={"count": 2, "width": 3, "prefill_s_per_token": 0.01}))
    assert (one.width, one.capacity, one.s_per_token, one.prefill_s) == (3, 6, 0.02, 1.0)
    assert (one.s_per_token, one.fetch_s) == (other.s_per_token, other.fetch_s)


def test_throughput_is_log_normal(scenario_of: ScenarioOf) -> None:
    nodes = draw_nodes(scenario_of(nodes={"count": 5_000, "sigma": 0.5}))
    logs = [log(node.s_per_token / 0.02) for node in nodes]
    assert (fmean(logs), pstdev(logs)) == pytest.approx((0, 0.5), abs=0.03)


def test_slow_and_rented_nodes_have_their_given_numbers(scenario_of: ScenarioOf) -> None:
    nodes = draw_nodes(
        scenario_of(
            nodes={"count": 5_000, "slow_share": 0.2, "slow_factor": 5, "rented_share": 0.3, "price_per_hour": 2.0}
        )
    )
    assert fmean(node.s_per_token > 0.05 for node in nodes) == pytest.approx(0.2, abs=0.03)
    assert fmean(node.price_per_hour for node in nodes) == pytest.approx(0.6, abs=0.06)


@pytest.mark.parametrize(
    ("hub", "node", "downlink", "bound"),
    [
        (1e6, 1e9, 1e9, 8.0),  # Bound by the hub's uplink.
        (1e7, 1e6, 1e9, 4 * 8 / 14),  # Bound by all uplinks together.
        (1e9, 1e9, 1e6, 8.0),  # Bound by each node's downlink.
    ],
)
def test_the_slowest_link_decides_a_versions_time(
    scenario_of: ScenarioOf, hub: float, node: float, downlink: float, bound: float
) -> None:
    links = {
        "payload_bytes": 8e6,
        "hub_uplink_bytes_s": hub,
        "node_uplink_bytes_s": node,
        "start_s": 0.3,
        "factor": 1.5,
    }
    scenario = scenario_of(nodes={"count": 4}, publication=links)
    assert fetch_s(scenario, downlink, 4 * node) == pytest.approx(0.3 + 1.5 * bound)


def test_a_liar_claims_and_has_nothing(scenario_of: ScenarioOf) -> None:
    claimed = liar(scenario_of(false_claims={"capacity": 99}))
    assert (claimed.capacity, claimed.width) == (99, 0)
