from __future__ import annotations

from echo_hub.core.accounting.effects import RevokeLease, RolloutsDropped, SendLease
from echo_hub.core.accounting.events import RolloutScored
from echo_hub.core.trust.forgetting import Forgetting
from echo_shared.wire.messages import DropReason, ReceiptState


def ends(bench) -> dict[str, DropReason]:
    return {name: record.reason for record in bench.of(RolloutsDropped) for name in record.rollout_ids}


def taken(bench) -> None:
    """Move the effects that the ledger has queued to `bench.effects`, where tests look for effects."""
    bench.effects = bench.coordinator._out.take()


def test_a_group_that_loses_a_scored_rollout_is_complete_no_more(bench) -> None:
    bench = bench()
    bench.node("a")
    for lease in list(bench.leases.values()):
        bench.deliver(lease)
    ledger = bench.coordinator._ledger
    assert list(ledger.complete) == [0, 1] and list(ledger.flat) == [0, 1]
    rollout = next(each for each in ledger.rollouts.values() if each.group_id == 0)
    assert not Forgetting(ledger).is_consumed(rollout)
    Forgetting(ledger).forget_rollout(rollout, DropReason.FORGED, "why", is_its_own=True)
    taken(bench)
    assert ends(bench) == {rollout.rollout_id: DropReason.FORGED}
    assert list(ledger.complete) == [1] and list(ledger.flat) == [1]
    assert ledger.groups[0].unleased == {rollout.index} and ledger.groups[0].slots[rollout.index].failed_on == ("a",)


def test_a_node_is_not_blamed_for_a_forged_prefix_of_another(bench) -> None:
    bench = bench()
    bench.node("a")
    (lease, *_) = bench.leases.values()
    bench.tell(bench.arrival(lease, 0))
    ledger = bench.coordinator._ledger
    rollout = ledger.rollouts[f"{lease.lease_id}-0"]
    Forgetting(ledger).forget_rollout(rollout, DropReason.FORGED, "why", is_its_own=False)
    taken(bench)
    assert ends(bench) == {rollout.rollout_id: DropReason.REVOKED}
    assert ledger.groups[0].slots[0].failed_on == ()


def test_a_rollout_without_a_known_forger_blames_no_node(bench) -> None:
    bench = bench()
    bench.node("a")
    (lease, *_) = bench.leases.values()
    bench.tell(bench.arrival(lease, 0))
    ledger = bench.coordinator._ledger
    rollout = ledger.rollouts[f"{lease.lease_id}-0"]
    Forgetting(ledger).set_aside(rollout, "why")
    taken(bench)
    (dropped,) = bench.of(RolloutsDropped)
    assert (dropped.rollout_ids, dropped.reason, dropped.detail) == ((rollout.rollout_id,), DropReason.REVOKED, "why")
    assert ledger.groups[0].slots[0].failed_on == () and 0 in ledger.groups[0].unleased


def test_all_that_a_node_had_a_hand_in_goes(bench) -> None:
    bench = bench(groups_per_step=4)
    bench.node("a")
    held = list(bench.leases.values())
    bench.tell(bench.arrival(held[0], held[0].indices[0]))
    bench.tell(RolloutScored(rollout_id=f"{held[0].lease_id}-{held[0].indices[0]}", reward=1.0))
    ledger = bench.coordinator._ledger
    states = {name: each.state for name, each in ledger.rollouts.items()}
    assert set(states.values()) == {ReceiptState.SCORED, ReceiptState.LEASED}
    other = next(name for name, state in states.items() if state is ReceiptState.LEASED)
    ledger.rollouts[other].node_id, ledger.rollouts[other].drawn_by = "a", ("x",)
    Forgetting(ledger).forget_node("x", "why")
    taken(bench)
    # The lease's other indices stay wanted, so no lease is revoked.
    assert not bench.of(RevokeLease)
    assert ends(bench) == {other: DropReason.REVOKED}
    Forgetting(ledger).forget_node("a", "why")
    taken(bench)
    assert set(ends(bench).values()) == {DropReason.QUARANTINED} and len(ends(bench)) == len(states) - 1
    assert {revoked.node_id for revoked in bench.of(RevokeLease)} == {"a"}
    assert not ledger.rollouts and not bench.of(SendLease)
