"""Costs accrue while nodes are active, and are recorded at least once every `ACCRUE_S` seconds."""

from __future__ import annotations

from math import inf

import pytest

from echo_hub.core.accounting.effects import CostAccrued, NodeCost
from echo_hub.core.activation.meter import A_SECOND, ACCRUE_S, AT_ONCE, LONGEST_S, CostMeter


def dollars(records: list[CostAccrued | None]) -> float:
    return sum(cost.dollars for record in records if record for cost in record.nodes)


def test_an_hour_costs_the_given_price() -> None:
    meter = CostMeter()
    assert meter.due_at == inf and meter.take(0.0) is None
    meter.begin("a", 0.36, 100.0)
    records, now = [], 100.0
    while now < 3_690:
        now = meter.due_at
        records.append(meter.take(now))
        assert meter.take(now) is None, "once"
    meter.end("a", 3_700.0)
    assert meter.due_at == -inf
    records.append(meter.take(3_700.0))
    assert dollars(records) == pytest.approx(0.36)
    assert meter.due_at == inf and meter.per_hour == 0


def test_cost_is_booked_at_least_once_per_accrual_period() -> None:
    meter = CostMeter()
    meter.begin("a", 1.0, 0.0)
    meter.begin("b", 2.0, 1.0)
    assert meter.per_hour == 3.0
    assert meter.due_at == ACCRUE_S
    assert meter.take(ACCRUE_S) == CostAccrued(nodes=(NodeCost("a", 5.0, 5.0 / 3600),))
    assert meter.due_at == 1.0 + ACCRUE_S


def test_many_nodes_take_turns() -> None:
    meter, count = CostMeter(), 2_000
    for number in range(count):
        meter.begin(str(number), 1.0, 0.0)
    period_s = count / A_SECOND
    assert meter.due_at == ACCRUE_S, "the due time of the first record does not move"
    assert meter.take(ACCRUE_S) is None and meter.due_at == period_s
    records = [meter.take(period_s) for _ in range(count // AT_ONCE + 1)]
    assert all(record is not None and len(record.nodes) <= AT_ONCE for record in records)
    assert meter.due_at == 2 * period_s
    assert dollars(records) == pytest.approx(count * period_s / 3600)


def test_time_in_which_the_computer_slept_is_not_paid_and_the_clock_may_go_back() -> None:
    meter = CostMeter()
    meter.begin("a", 3600.0, 1_000.0)
    assert dollars([meter.take(40_000.0)]) == LONGEST_S
    meter.end("a", 39_000.0)
    assert dollars([meter.take(39_000.0)]) == 0
    meter.begin("a", 3600.0, 40_000.0)
    assert meter.take(30_000.0) is None
    assert dollars([meter.take(30_000.0 + ACCRUE_S)]) == ACCRUE_S
