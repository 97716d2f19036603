"""Nodes on standby get no leases; the coordinator records the cost of active ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from echo_hub.core.accounting.effects import CostAccrued, FinishRun, SendLease, TellStandby
from echo_hub.core.accounting.events import LeaseGivenBack, NodeConnected, NodeDisconnected, NodeReported, Tick
from echo_hub.core.activation.settings import ActivationSettings
from echo_shared.wire.messages import StandbyReason


def run_with(bench: Callable[..., Any], cap: float, **settings: Any) -> Any:
    run = bench(activation=ActivationSettings(spend_cap_per_hour=cap), max_staleness=2, **settings)
    run.learner()
    return run


def join(run: Any, node_id: str, cost: float) -> list[Any]:
    return run.tell(
        NodeConnected(node_id=node_id, cost_per_hour=cost),
        NodeReported(node_id=node_id, capacity=100, policy_version=0),
    )


def pass_by(run: Any, seconds: float) -> list[Any]:
    effects, end = [], run.now + seconds
    while (due := run.coordinator.due_at()) is not None and due <= end:
        run.now = max(run.now, due)
        effects += run.tell(Tick())
    run.now = end
    return effects


def of(effects: list[Any], kind: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_with_a_zero_cap_a_paid_node_gets_no_work_and_is_told(bench: Callable[..., Any]) -> None:
    run = run_with(bench, 0.0)
    effects = join(run, "dear", 0.4) + pass_by(run, 60.0)
    assert not of(effects, SendLease) and not of(effects, CostAccrued)
    assert [(told.node_id, told.reason) for told in of(effects, TellStandby)] == [("dear", StandbyReason.SPEND_CAP)]
    assert run.coordinator.status().nodes_priced == 1 and run.coordinator.status().nodes_active == 0
    assert of(join(run, "gift", 0.0), SendLease)


def test_an_active_node_gets_leases_and_is_paid_until_it_leaves(bench: Callable[..., Any]) -> None:
    run = run_with(bench, 1.0, deadline_s=600.0)
    effects = join(run, "dear", 0.36) + pass_by(run, 2.0)
    assert {sent.node_id for sent in of(effects, SendLease)} == {"dear"}
    assert run.coordinator.status().spend_per_hour == 0.36
    effects += pass_by(run, 99.0) + run.tell(NodeDisconnected(node_id="dear")) + pass_by(run, 1.0)
    costs = [cost for record in of(effects, CostAccrued) for cost in record.nodes]
    assert sum(cost.dollars for cost in costs) == pytest.approx(0.36 * sum(cost.active_s for cost in costs) / 3600)
    assert 99.0 < sum(cost.active_s for cost in costs) <= 101.0
    assert run.coordinator.status().spend_per_hour == 0 == run.coordinator.status().nodes_priced


def test_a_node_sent_to_standby_may_finish_its_rollouts(bench: Callable[..., Any]) -> None:
    run = run_with(bench, 1.0)
    effects = join(run, "dear", 0.36) + pass_by(run, 2.0)
    lease = of(effects, SendLease)[0]
    run.coordinator._nodes.set_active("dear", False)
    assert run.coordinator.status().leased_by_node["dear"]
    run.deliver(lease)
    assert not of(run.tell(LeaseGivenBack(node_id="dear", lease_id=99, indices=(0,), reason="x")), SendLease)


def test_the_books_are_complete_when_the_run_ends(bench: Callable[..., Any]) -> None:
    run = run_with(bench, 1.0, steps=1)
    join(run, "dear", 0.36)
    effects = pass_by(run, 3.0)
    for group_id in (0, 1):
        effects += run.deliver_group(group_id)
    effects += run.train(1)
    assert of(effects, FinishRun)
    costs = [cost for record in of(effects, CostAccrued) for cost in record.nodes]
    assert sum(cost.active_s for cost in costs) == pytest.approx(2.0, abs=1.0)
    assert run.coordinator.status().spend_per_hour == 0
    assert not of(pass_by(run, 60.0), CostAccrued)


def test_an_invalid_completion_does_not_change_its_nodes_pace(bench: Callable[..., Any]) -> None:
    run = run_with(bench, 0.0)
    lease = of(run.node("slow"), SendLease)[0]
    node = run.coordinator._nodes.get("slow")
    arrival = run.arrival(lease, lease.indices[0], rollout_id="99-0", problem="100000 tokens, of 1 to 16")
    for came, token_s in ((arrival, 0.0), (replace(arrival, problem=""), 0.05)):
        run.coordinator._activation.had_turn("99-0", "slow", run.now)
        run.now += 1.0
        run.tell(came)
        assert node.pace.token_s == pytest.approx(token_s)
