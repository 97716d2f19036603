"""The costs that a simulation reports must equal those in the coordinator's records."""

from __future__ import annotations

from typing import Any

import pytest

from echo_hub.core.accounting.effects import CostAccrued, NodeCost, TellStandby
from echo_hub.simulator.costs import Costs
from echo_shared.wire.messages import StandbyReason

RENTED = {"rented_share": 1.0, "price_per_hour": 36.0}


def test_records_add_up() -> None:
    costs = Costs()
    costs.accrue(CostAccrued(nodes=(NodeCost("a", 5.0, 1.0), NodeCost("b", 5.0, 2.0))), 10.0)
    costs.accrue(CostAccrued(nodes=(NodeCost("a", 5.0, 1.0),)), 20.0)
    assert (costs.dollars, costs.until(9.0), costs.until(10.0), costs.until(99.0)) == (4.0, 0.0, 3.0, 4.0)
    costs.tell(TellStandby(node_id="a", reason=StandbyReason.TOO_SLOW))
    costs.tell(TellStandby(node_id="a", reason=None))
    assert costs.told == {"too_slow": 1}


def test_under_a_cap_of_nothing_nothing_is_spent(simulated: Any) -> None:
    _, report = simulated(nodes=RENTED, prices={"spend_cap_per_hour": 0.0}, measuring={"limit_s": 200.0})
    assert (report.cost, report.trained, report.finished) == (0.0, 0, False)


def test_paid_nodes_cost_no_more_than_the_cap(simulated: Any) -> None:
    _, report = simulated(nodes=RENTED, prices={"spend_cap_per_hour": 40.0}, measuring={"limit_s": 2_000.0})
    assert report.trained and 0 < report.cost <= 40.0 / 3600 * report.virtual_s


def test_if_all_nodes_are_needed_all_are_paid(simulated: Any) -> None:
    _, chosen = simulated(nodes=RENTED)
    _, all_on = simulated(nodes=RENTED, prices={"choose": False})
    assert 0.5 * all_on.cost < chosen.cost <= all_on.cost * 1.0001
    assert chosen.utilisation == pytest.approx(all_on.utilisation, abs=0.1)
