"""A node that seems too slow for work gets one first rollout, which measures the node; no step waits for that
rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echo_hub.core.accounting.effects import LookUpReceipt, SendLease
from echo_hub.core.accounting.events import Tick


def test_a_turn_is_leased_to_others_as_well(bench: Callable[..., Any]) -> None:
    run = bench(steps=9, groups_per_step=2, group_size=2, max_staleness=2)
    run.learner()
    run.node("slow", capacity=2)
    coordinator = run.coordinator
    assert coordinator.status().in_flight == 2, "the node holds its whole capacity"
    node = coordinator._nodes.get("slow")
    assert coordinator._leasing.lease_turn(node, run.now) is None, "it has no capacity left"
    node.capacity = 3
    given = coordinator._leasing.lease_turn(node, run.now)
    coordinator._activation.had_turn(given, "slow", run.now)
    rollout = coordinator._ledger.rollouts[given]
    youngest = max(coordinator._ledger.groups)
    assert rollout.group_id == youngest and rollout.late
    assert given in {f"{lease.lease_id}-{lease.indices[0]}" for lease in _sent(run.tell(Tick()))}

    run.node("fast", capacity=100)
    others = [lease for lease in run.leases.values() if lease.node_id == "fast" and lease.group_id == youngest]
    (again,) = [lease for lease in others if rollout.index in lease.indices]
    run.deliver(again)
    assert given not in coordinator._ledger.rollouts, "the first valid result counts"
    run.now += 30.0
    turn = next(lease for lease in run.leases.values() if f"{lease.lease_id}-{rollout.index}" == given)
    before = node.pace.tokens_per_s
    assert any(isinstance(effect, LookUpReceipt) for effect in run.tell(run.arrival(turn, rollout.index)))
    assert node.pace.tokens_per_s > before, "a result that no step waits for still measures the node"


def _sent(effects: list[Any]) -> list[SendLease]:
    return [effect for effect in effects if isinstance(effect, SendLease)]
