"""Groups, arriving results, scores and restarts; leases are tested in test_leasing, steps in test_training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from echo_hub.core.accounting.effects import (
    GroupDropped,
    LookUpReceipt,
    PrepareGroup,
    RolloutReceipt,
    RolloutReceived,
    RolloutsDropped,
    ScoreRecorded,
    ScoreRollout,
    SendLease,
    SendReceipts,
)
from echo_hub.core.accounting.events import (
    GroupPrepared,
    LeaseGivenBack,
    NodeConnected,
    NodeReported,
    RolloutRejected,
    RolloutScored,
    Tick,
)
from echo_hub.core.accounting.groups import turn_seed
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot, GroupRow, UnfinishedRollout
from echo_hub.core.nodes.conduct import MAX_REST_S
from echo_hub.core.returns import MAX_RETURNS
from echo_shared.wire.messages import DropReason, ReceiptState

BenchOf = Callable[..., Any]


def test_rollouts_lost_without_a_culprit_are_leased_again_without_blame(bench: BenchOf) -> None:
    b = bench()
    b.node("a")
    b.tell(replace(b.arrival(b.leases[1], 0), is_unattributed=True))
    (dropped,) = b.of(RolloutsDropped)
    assert (dropped.rollout_ids, dropped.reason) == (("1-0",), DropReason.RETURNED)
    assert not b.of(ScoreRollout) and b.coordinator._nodes.get("a").num_failures == 0
    assert b.receipts("a")[0].state is ReceiptState.DROPPED
    again = [lease for lease in b.of(SendLease) if lease.group_id == b.leases[1].group_id]
    assert [lease.indices for lease in again] == [(0,)]


def test_rollouts_that_arrive_together_are_acked_and_leased_in_one_turn(bench: BenchOf) -> None:
    b, apart = bench(), bench()
    for each in (b, apart):
        each.node("a", capacity=2)
    lease = b.leases[1]
    arrivals = [b.arrival(lease, index) for index in lease.indices]
    together = b.coordinator.handle_all(arrivals, b.now)
    one_by_one = apart.tell(*arrivals)
    (told,) = [effect for effect in together if isinstance(effect, SendReceipts)]
    assert [receipt.rollout_id for receipt in told.receipts] == [each.rollout_id for each in arrivals]
    for kind in (RolloutReceived, ScoreRollout):
        assert [e for e in together if isinstance(e, kind)] == [e for e in one_by_one if isinstance(e, kind)]
    assert len([e for e in one_by_one if isinstance(e, SendReceipts)]) == len(arrivals) > 1


def test_a_valid_rollout_is_received_acked_and_scored(bench: BenchOf) -> None:
    b = bench()
    b.node("a")
    b.tell(b.arrival(b.leases[1], 0))
    assert [type(effect) for effect in b.effects] == [RolloutReceived, SendReceipts, ScoreRollout]
    assert b.receipts("a") == [RolloutReceipt(rollout_id="1-0", state=ReceiptState.RECEIVED)]
    b.tell(RolloutScored(rollout_id="1-0", reward=0.75))
    assert b.of(ScoreRecorded) == [ScoreRecorded(rollout_id="1-0", reward=0.75)]
    assert b.receipts("a") == [RolloutReceipt(rollout_id="1-0", state=ReceiptState.SCORED)]


def test_a_repeat_gets_the_present_receipt_and_changes_nothing(bench: BenchOf) -> None:
    b = bench()
    b.node("a")
    b.tell(b.arrival(b.leases[1], 0))
    b.tell(b.arrival(b.leases[1], 0))
    assert [type(effect) for effect in b.effects] == [SendReceipts]
    assert b.receipts("a") == [RolloutReceipt(rollout_id="1-0", state=ReceiptState.RECEIVED)]
    b.tell(RolloutScored(rollout_id="1-0", reward=1.0))
    b.tell(b.arrival(b.leases[1], 0))
    assert b.receipts("a") == [RolloutReceipt(rollout_id="1-0", state=ReceiptState.SCORED)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lease_id": 9}, "lease 9 instead of 1"),
        ({"group_id": 9}, "group 9 instead of 0"),
        ({"index": 1}, "index 1 instead of 0"),
        ({"policy_version_start": 9}, "first policy version 9 instead of 0"),
        ({"policy_version_end": 9}, "last policy version 9 instead of 0"),
    ],
)
def test_a_result_that_contradicts_its_lease_is_dropped(bench: BenchOf, change: dict[str, int], said: str) -> None:
    b = bench()
    b.node("a")
    b.node("b")
    b.tell(b.arrival(b.leases[1], 0, **change))
    (dropped,) = b.of(RolloutsDropped)
    assert (dropped.rollout_ids, dropped.reason, dropped.detail) == (("1-0",), DropReason.INVALID, said)
    assert b.receipts("a") == [
        RolloutReceipt(rollout_id="1-0", state=ReceiptState.DROPPED, drop_reason=DropReason.INVALID)
    ]
    assert [(lease.node_id, lease.indices) for lease in b.of(SendLease)] == [("b", (0,))]


@pytest.mark.parametrize("change", [{"node_id": "b"}, {"rollout_id": "99-0"}, {"rollout_id": "01-0"}])
def test_a_result_that_was_not_leased_to_its_sender_is_looked_up(bench: BenchOf, change: dict[str, str]) -> None:
    """A rollout that the sender does not hold may have ended long ago, so the hub looks it up in the store."""
    b = bench()
    b.node("a")
    b.node("b")
    event = b.arrival(b.leases[1], 0, **change)
    b.tell(event)
    assert b.effects == [LookUpReceipt(node_id=event.node_id, rollout_id=event.rollout_id)]
    b.tell(b.arrival(b.leases[1], 0))
    assert len(b.of(RolloutReceived)) == 1, "the right node's result still counts"


def test_a_rejected_rollout_is_dropped_and_its_index_leased_again(bench: BenchOf) -> None:
    b = bench(groups_per_step=1)
    b.node("a")
    b.deliver(b.leases[1], score=False)
    b.tell(RolloutRejected(rollout_id="1-0", reason=DropReason.INVALID, detail="another model's"))
    (dropped,) = b.of(RolloutsDropped)
    assert (dropped.rollout_ids, dropped.reason, dropped.detail) == (("1-0",), DropReason.INVALID, "another model's")
    b.now += 1.0
    b.tell(Tick())
    assert [lease.indices for lease in b.of(SendLease)] == [(0,)]


def test_a_verdict_that_comes_too_late_is_harmless(bench: BenchOf) -> None:
    b = bench()
    b.node("a")
    b.tell(b.arrival(b.leases[1], 0), RolloutScored(rollout_id="1-0", reward=1.0))
    b.tell(
        RolloutScored(rollout_id="1-0", reward=0.0),
        RolloutRejected(rollout_id="1-0", reason=DropReason.INVALID, detail=""),
        RolloutScored(rollout_id="9-9", reward=0.0),
        RolloutRejected(rollout_id="9-9", reason=DropReason.INVALID, detail=""),
    )
    assert b.effects == []


def test_a_problem_that_breaks_the_scorer_is_given_up(bench: BenchOf) -> None:
    b = bench(groups_per_step=1)
    b.node("a")
    seeds: set[int] = set()
    for attempt in range(3):
        lease = next(lease for lease in reversed(b.leases.values()) if lease.group_id == 0)
        b.tell(b.arrival(lease, 0))
        assert b.of(GroupDropped) == []
        seeds.add(lease.seed)
        b.tell(
            RolloutRejected(
                rollout_id=f"{lease.lease_id}-0", reason=DropReason.SCORER_FAILED, detail=f"attempt {attempt}"
            )
        )
    assert len(seeds) == 3, "three different completions"
    assert b.of(GroupDropped) == [GroupDropped(group_id=0, reason=DropReason.SCORER_FAILED)]
    assert b.of(PrepareGroup) == [PrepareGroup(group_id=1)], "another problem takes its place"
    assert b.coordinator.status().in_flight == 2


def test_a_problem_that_no_node_can_work_on_is_given_up(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, group_size=2)
    b.node("a")
    for attempt in range(MAX_RETURNS):
        assert not any(isinstance(effect, GroupDropped) for effect in b.effects)
        lease = next(lease for lease in reversed(b.leases.values()) if lease.group_id == 0)
        b.tell(LeaseGivenBack(node_id="a", lease_id=lease.lease_id, indices=lease.indices, reason=str(attempt)))
        dropped = b.of(GroupDropped)
        b.now += MAX_REST_S
        b.tell(Tick())
    assert dropped == [GroupDropped(group_id=0, reason=DropReason.RETURNED)]
    assert b.coordinator.status().groups_open == 1, "another problem takes its place"


def test_a_node_that_crashes_scoring_in_several_groups_rests(bench: BenchOf) -> None:
    b = bench(groups_per_step=4)
    b.node("a", capacity=4)
    for lease_id in (1, 2):
        b.tell(b.arrival(b.leases[lease_id], 0))
        b.tell(
            RolloutRejected(
                rollout_id=f"{lease_id}-0", reason=DropReason.SCORER_FAILED, detail="SIGSEGV", killed_scorer=True
            )
        )
        b.tell(b.arrival(b.leases[lease_id], 1))
        assert bool(b.of(SendLease)) == (lease_id == 1), "it has capacity for another group"


def test_status_counts_groups_leases_and_nodes(bench: BenchOf) -> None:
    b = bench(max_staleness=1)
    b.node("a", capacity=6)
    b.learner()
    b.deliver_group(0)
    b.tell(b.arrival(b.leases[2], 0))
    status = b.coordinator.status()
    assert (status.training_step, status.trained_steps, status.published_version) == (None, 0, 0)
    assert (status.groups_open, status.groups_buffered, status.groups_planned) == (3, 1, 0)
    assert (status.in_flight, status.leased_by_node, status.nodes_connected) == (8, {"a": 5}, 1)
    b.tell(RolloutScored(rollout_id="2-0", reward=1.0))
    b.deliver_group(1)
    status = b.coordinator.status()
    assert (status.training_step, status.groups_planned, status.groups_buffered) == (1, 2, 0)
    assert b.coordinator.published_version == 0


def test_a_run_without_a_task_opens_no_group_and_never_ends(bench: BenchOf) -> None:
    b = bench(trains=False)
    b.node("a", capacity=6)
    b.tell(Tick())
    assert b.prepared == [] and b.leases == {}
    status = b.coordinator.status()
    assert (status.nodes_connected, status.groups_preparing, status.finished) == (1, 0, False)


def row(rollout_id: str, node_id: str, state: ReceiptState, deadline: float = 5_000.0) -> UnfinishedRollout:
    lease_id, _, index = rollout_id.partition("-")
    return UnfinishedRollout(
        rollout_id=rollout_id,
        lease_id=int(lease_id),
        node_id=node_id,
        group_id=6,
        index=int(index),
        policy_version=0,
        deadline=deadline,
        state=state,
        reward=None,
    )


def restarted(*rows: UnfinishedRollout) -> CoordinatorSnapshot:
    return CoordinatorSnapshot(next_group_id=7, next_lease_id=8, groups=(GroupRow(group_id=6, seed=66),), rollouts=rows)


def test_a_restart_repeats_what_may_have_been_lost(bench: BenchOf) -> None:
    snapshot = restarted(row("7-0", "a", ReceiptState.RECEIVED), row("7-1", "a", ReceiptState.LEASED))
    b = bench(snapshot, group_size=3, prepare=False)
    assert b.effects == [ScoreRollout(rollout_id="7-0"), PrepareGroup(group_id=7)]
    b.node("b")
    (lease,) = b.of(SendLease)
    assert (lease.lease_id, lease.group_id, lease.indices, lease.seed) == (8, 6, (2,), 66)


def test_a_lease_from_before_a_restart_is_still_good(bench: BenchOf) -> None:
    b = bench(restarted(row("7-0", "a", ReceiptState.LEASED), row("7-1", "a", ReceiptState.LEASED)))
    b.node("a", capacity=3)
    lease = SendLease(
        node_id="a",
        lease_id=7,
        group_id=6,
        indices=(0, 1),
        seed=66,
        policy_version=0,
        deadline_s=4000.0,
        goes_on=((0, 7), (1, 7)),
    )
    assert lease in b.of(SendLease), "the lease may have been lost"
    assert b.coordinator.status().leased_by_node == {"a": 3}
    b.tell(b.arrival(lease, 1))
    assert b.receipts("a") == [RolloutReceipt(rollout_id="7-1", state=ReceiptState.RECEIVED)]


def test_a_restart_continues_with_the_seed_that_has_not_failed_yet(bench: BenchOf) -> None:
    before = bench(mode="sequential", groups_per_step=1, prepare=False)
    before.tell(GroupPrepared(group_id=0, seed=66))
    before.node("a")
    (lease,) = before.leases.values()
    before.deliver(lease, score=False)
    before.tell(RolloutRejected(rollout_id="1-1", reason=DropReason.SCORER_FAILED, detail="no"))
    (again,) = before.of(SendLease)
    assert again.indices == (1,) and again.seed != lease.seed == 66

    failed = replace(restarted(), scorer_failures=((6, 1, 0),))
    after = bench(failed, mode="sequential", groups_per_step=1, prepare=False)
    after.node("b")
    assert [(lease.indices, lease.seed) for lease in after.of(SendLease)] == [((0,), 66), ((1,), again.seed)]


def test_an_earlier_turns_failure_does_not_count_for_the_present_turn(bench: BenchOf) -> None:
    answered = UnfinishedRollout(
        rollout_id="7-0",
        lease_id=7,
        node_id="a",
        group_id=6,
        index=0,
        policy_version=0,
        deadline=1_050.0,
        state=ReceiptState.SCORED,
        reward=None,
    )
    for turn, expected in ((0, turn_seed(66, 1)), (1, turn_seed(66, 1, 1))):
        snapshot = replace(restarted(answered), scorer_failures=((6, 0, turn),))
        b = bench(snapshot, group_size=1, multi_turn=True, prepare=False)
        b.node("b")
        assert [(lease.turn, lease.seed) for lease in b.of(SendLease)] == [(1, expected)]


def test_rollouts_that_the_learner_was_sampling_are_leased_again_after_a_restart(bench: BenchOf) -> None:
    b = bench(restarted(row("7-0", "hub", ReceiptState.LEASED)), mode="colocated")
    (dropped,) = b.of(RolloutsDropped)
    assert (dropped.rollout_ids, dropped.reason) == (("7-0",), DropReason.RETURNED)


@pytest.mark.parametrize(("addresses", "invites", "given"), [(9, 0, 4), (1, 0, 1), (9, 1, 1), (1, 9, 4)])
def test_new_keys_of_one_invite_share_places_of_their_own(
    bench: BenchOf, addresses: int, invites: int, given: int
) -> None:
    """Unknown keys together may hold four rollouts. Keys of one invite share one rollout, as do keys of one address
    without an invite.
    """
    here = bench(groups_per_step=16, group_size=4, first_window=4)
    here.learner()
    here.node("old", 4)
    here.deliver(here.of(SendLease)[0])
    for number in range(9):
        invite = f"invite {number % invites}" if invites else ""
        here.tell(NodeConnected(node_id=f"key {number}", origin=f"192.0.2.{number % addresses}", invite=invite))
        here.tell(NodeReported(node_id=f"key {number}", capacity=4, policy_version=0))
    assert sum(lease.node_id.startswith("key") for lease in here.leases.values()) == given


def test_a_proven_owner_is_one_of_the_things_that_nodes_share(bench: BenchOf) -> None:
    here = bench()
    here.tell(NodeConnected(node_id="a", origin="192.0.2.1", owner="owner 07"))
    assert here.coordinator._trust._standings.of("a").kin == {"192.0.2.1", "owner 07"}
