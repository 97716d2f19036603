"""Which node gets each lease, how many rollouts it may hold, and what happens after a lease's deadline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from echo_hub.core.accounting.effects import (
    PrepareGroup,
    RevokeLease,
    RolloutsDropped,
    RolloutsLeased,
    ScoreRollout,
    SendLease,
)
from echo_hub.core.accounting.events import (
    GroupPrepared,
    LeaseGivenBack,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    RolloutContinued,
    RolloutRejected,
    RolloutScored,
    Tick,
)
from echo_hub.core.accounting.groups import turn_seed
from echo_hub.core.policy.leasing import LEASED_AT_ONCE
from echo_hub.core.policy.outstanding import LEFT_S
from echo_shared.records.rollout import RolloutPayload
from echo_shared.sampling.draws import derive_seed
from echo_shared.wire.messages import DropReason, FinishReason, ReceiptState

BenchOf = Callable[..., Any]
PAYLOAD = RolloutPayload(
    completion_ids=np.array([5, 7], np.int32),
    behavior_logprobs=np.array([-0.5, -1.25], np.float32),
    finish_reason=FinishReason.STOP,
    sampling_s=0.1,
)


def test_a_group_is_leased_by_its_members_as_far_as_nodes_have_room(bench: BenchOf) -> None:
    b = bench(group_size=4, groups_per_step=2)
    b.node("a", capacity=6)
    b.node("b", capacity=8)
    assert [(lease.node_id, lease.group_id, lease.indices) for lease in b.leases.values()] == [
        ("a", 0, (0, 1, 2, 3)),
        ("a", 1, (0, 1)),
        ("b", 1, (2, 3)),
    ]


def test_a_group_is_spread_when_no_node_is_big_enough(bench: BenchOf) -> None:
    b = bench(group_size=4, groups_per_step=1, steps=1)
    b.node("a", capacity=3)
    b.node("b", capacity=3)
    assert [(lease.node_id, lease.indices) for lease in b.leases.values()] == [("a", (0, 1, 2)), ("b", (3,))]


def test_groups_are_shared_out_over_the_fleet(bench: BenchOf) -> None:
    b = bench(groups_per_step=6, steps=1, prepare=False)
    for node_id in "abc":
        b.node(node_id, capacity=4)
    b.tell(*(GroupPrepared(group_id=group_id, seed=1) for group_id in range(6)))
    assert [lease.node_id for lease in b.leases.values()] == ["a", "b", "c", "a", "b", "c"]


def test_groups_opened_before_any_length_was_known_are_not_passed_by_those_opened_after(bench: BenchOf) -> None:
    b = bench(groups_per_step=3, group_size=2, steps=1, prepare=False)
    b.node("a", capacity=2)
    b.tell(GroupPrepared(group_id=0, seed=1), GroupPrepared(group_id=1, seed=1))
    b.tell(b.arrival(b.leases[1], 0))
    b.tell(GroupPrepared(group_id=2, seed=1), b.arrival(b.leases[1], 1))
    assert [lease.group_id for lease in b.leases.values()] == [0, 1, 1]


def test_capacity_is_never_exceeded_and_a_finished_rollout_frees_it(bench: BenchOf) -> None:
    b = bench(groups_per_step=3)
    b.node("a", capacity=3)
    assert [(lease.group_id, lease.indices) for lease in b.leases.values()] == [(0, (0, 1)), (1, (0,))]
    b.tell(b.arrival(b.leases[1], 0))
    assert [(lease.group_id, lease.indices) for lease in b.of(SendLease)] == [(1, (1,))]
    b.tell(b.arrival(b.leases[1], 1))
    assert [(lease.group_id, lease.indices) for lease in b.of(SendLease)] == [(2, (0,))]
    assert b.coordinator.status().leased_by_node == {"a": 3}


def test_a_lease_past_its_deadline_goes_to_another_node_and_a_late_result_may_still_win(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, steps=1)
    b.node("a")
    b.node("b")
    b.now += 59.0
    b.tell(Tick())
    assert b.of(SendLease) == []
    b.now += 1.0
    b.tell(Tick())
    (again,) = b.of(SendLease)
    assert (again.node_id, again.indices) == ("b", (0, 1))
    assert b.of(RolloutsDropped) == []
    b.deliver(b.leases[1])
    assert [r.drop_reason for r in b.receipts("b")] == [DropReason.EXPIRED] * 2
    assert b.of(RevokeLease) == [RevokeLease(node_id="b", lease_id=2, reason=DropReason.EXPIRED)]
    (lost,) = b.of(RolloutsDropped)
    assert (lost.rollout_ids, lost.reason) == (("2-0", "2-1"), DropReason.EXPIRED)


def test_the_second_result_for_an_index_is_a_duplicate(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, steps=1)
    b.node("a")
    b.node("b")
    b.now += 60.0
    b.tell(Tick())
    b.tell(b.arrival(b.leases[2], 0))
    b.tell(b.arrival(b.leases[1], 0))
    (dropped,) = b.of(RolloutsDropped)
    assert (dropped.rollout_ids, dropped.reason) == (("1-0",), DropReason.DUPLICATE)
    assert [(r.state, r.drop_reason) for r in b.receipts("a")] == [(ReceiptState.DROPPED, DropReason.DUPLICATE)]


def test_the_only_node_gets_its_own_expired_work_again(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, steps=1, group_size=2)
    b.node("a", capacity=2)
    b.now += 60.0
    b.tell(Tick())
    assert [lease.node_id for lease in b.of(SendLease)] == ["a"]


def test_late_work_goes_to_another_node_and_never_to_the_one_that_holds_it(bench: BenchOf) -> None:
    b = bench(groups_per_step=3, steps=1)
    b.node("a", capacity=4)
    b.now += 1.0
    b.deliver(b.leases[1])
    b.deliver(b.leases[2])
    held = b.leases[3]
    b.now += 40.0
    b.tell(Tick())
    assert b.of(SendLease) == [], "node a has room, but it would sample the same tokens twice"
    b.node("b", capacity=4)
    (again,) = b.of(SendLease)
    assert (again.node_id, again.group_id) == ("b", held.group_id)


def test_an_expired_index_waits_for_another_node_that_is_full(bench: BenchOf) -> None:
    b = bench(groups_per_step=2, steps=1)
    b.node("a", capacity=2)
    b.node("b", capacity=2)
    b.now += 30.0
    b.tell(b.arrival(b.leases[2], 0), b.arrival(b.leases[2], 1))
    b.now += 30.0
    b.tell(Tick())
    assert [(lease.node_id, lease.group_id) for lease in b.of(SendLease)] == [("b", 0)]


def test_when_an_index_failed_everywhere_the_latest_is_asked_last(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, steps=1)
    b.node("a", capacity=2)
    b.node("b", capacity=2)
    for expected in ([("b", (0, 1))], [("a", (0,))], [("b", (0,))]):
        b.now += 60.0
        b.tell(Tick())
        assert [(lease.node_id, lease.indices) for lease in b.of(SendLease)] == expected


def test_returned_work_is_leased_again_at_once(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, steps=1)
    b.node("a")
    b.node("b")
    b.tell(LeaseGivenBack(node_id="a", lease_id=1, indices=(1,), reason="on battery"))
    (dropped,) = b.of(RolloutsDropped)
    assert (dropped.rollout_ids, dropped.reason, dropped.detail) == (("1-1",), DropReason.RETURNED, "on battery")
    assert [(lease.node_id, lease.indices) for lease in b.of(SendLease)] == [("b", (1,))]


def test_a_node_that_returns_leases_rests_regardless_of_its_reports(bench: BenchOf) -> None:
    """A node that returns every lease without any result gets no new lease for 1 s, then twice as long each time, up to
    60 s, even if it reports free capacity."""
    b = bench(groups_per_step=1, steps=1)
    b.node("a")
    leased_at = []
    for _ in range(3_000):
        for lease in b.of(SendLease):
            leased_at.append(b.now)
            b.tell(LeaseGivenBack(node_id="a", lease_id=lease.lease_id, indices=lease.indices, reason="busy"))
        b.now += 0.1
        b.tell(NodeReported(node_id="a", capacity=4, policy_version=0))
    waits = [later - earlier for earlier, later in pairwise(leased_at)]
    assert [round(wait) for wait in waits] == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_scored_rollout_ends_a_rest(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, steps=1)
    b.node("a")
    b.tell(LeaseGivenBack(node_id="a", lease_id=1, indices=(1,), reason="busy"))
    assert b.of(SendLease) == []
    b.tell(b.arrival(b.leases[1], 0), RolloutScored(rollout_id="1-0", reward=1.0))
    assert [(lease.node_id, lease.indices) for lease in b.of(SendLease)] == [("a", (1,))]


def test_a_rollout_that_the_scorer_failed_on_is_sampled_with_a_new_seed(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, steps=1, group_size=4)
    b.node("a", capacity=4)
    b.deliver(b.leases[1], score=False)
    failed = [RolloutRejected(rollout_id=f"1-{i}", reason=DropReason.SCORER_FAILED, detail="no") for i in (1, 2)]
    b.tell(NodeReported(node_id="a", capacity=0, policy_version=0), *failed)
    b.tell(NodeReported(node_id="a", capacity=9, policy_version=0))
    (again,) = b.of(SendLease)
    assert (again.indices, again.seed) == ((1, 2), turn_seed(100, 0, 1)), (
        "both failed equally often, so they have one seed"
    )
    b.tell(b.arrival(again, 1), b.arrival(again, 2))
    b.tell(NodeReported(node_id="a", capacity=0, policy_version=0))
    b.tell(RolloutRejected(rollout_id="2-2", reason=DropReason.SCORER_FAILED, detail="no"))
    b.tell(RolloutRejected(rollout_id="1-3", reason=DropReason.SCORER_FAILED, detail="no"))
    b.tell(NodeReported(node_id="a", capacity=9, policy_version=0))
    leases = [(lease.indices, lease.seed) for lease in b.of(SendLease)]
    assert leases == [((2,), turn_seed(100, 0, 2)), ((3,), turn_seed(100, 0, 1))]
    assert len({turn_seed(100, turn, attempt) for turn in range(9) for attempt in range(9)}) == 81


def test_a_late_draw_of_the_seed_that_failed_is_not_scored_again(bench: BenchOf) -> None:
    """Nodes a and b sampled index 0 with the same seed. Scoring failed on node a's result, so it would fail on node b's
    too.
    """
    b = bench(groups_per_step=1, steps=1, deadline_s=60.0)
    b.node("a")
    b.node("b")
    b.now += 61.0
    b.tell(Tick())
    both = [lease for lease in b.leases.values() if 0 in lease.indices]
    assert [lease.node_id for lease in both] == ["a", "b"]
    b.tell(b.arrival(both[0], 0))
    b.tell(RolloutRejected(rollout_id="1-0", reason=DropReason.SCORER_FAILED, detail="no"))
    dropped = [(one.rollout_ids, one.reason) for one in b.of(RolloutsDropped)]
    assert dropped == [(("2-0",), DropReason.EXPIRED), (("1-0",), DropReason.SCORER_FAILED)]
    (again,) = b.of(SendLease)
    assert (again.indices, again.seed) == ((0,), turn_seed(100, 0, 1))
    b.tell(b.arrival(both[1], 0))
    assert b.of(ScoreRollout) == []
    num_leased = sum(len(lease.indices) for lease in b.leases.values())
    assert num_leased == 5 == len(dropped) + b.coordinator.status().in_flight


@pytest.mark.parametrize("reason", [DropReason.INVALID, DropReason.SCORER_FAILED])
def test_only_a_node_whose_rollout_is_invalid_rests(bench: BenchOf, reason: DropReason) -> None:
    b = bench(groups_per_step=1, steps=1)
    b.node("a")
    b.deliver(b.leases[1], score=False)
    b.tell(RolloutRejected(rollout_id="1-1", reason=reason, detail="no"))
    assert len(b.of(SendLease)) == (reason is DropReason.SCORER_FAILED)
    b.now += 1.0
    b.tell(Tick())
    assert len(b.of(SendLease)) == (reason is DropReason.INVALID)


def _steps_in_1200_s(bench: BenchOf, *, silent: int = 0) -> int:
    """Return the number of steps in 1,200 s with one node that needs 2 s for four rollouts. `silent` further nodes
    claim a large capacity and never deliver.
    """
    b = bench(steps=10_000, groups_per_step=4, group_size=4, deadline_s=60.0, max_staleness=1, first_window=4)
    b.learner()
    liars = [f"silent{number}" for number in range(silent)]
    for node_id in liars:
        b.node(node_id, capacity=4096)
    b.node("honest", capacity=8)
    done: set[str] = set()
    for second in range(1_200):
        b.now += 1.0
        version = b.coordinator.published_version
        b.tell(*(NodeReported(node_id=node_id, capacity=4096, policy_version=version) for node_id in liars))
        b.tell(NodeReported(node_id="honest", capacity=8, policy_version=version), Tick())
        held = [
            (lease, index)
            for lease in b.leases.values()
            if lease.node_id == "honest"
            for index in lease.indices
            if f"{lease.lease_id}-{index}" not in done
        ]
        for lease, index in held[:4] if second % 2 else ():
            done.add(f"{lease.lease_id}-{index}")
            b.tell(b.arrival(lease, index, payload=replace(PAYLOAD, sampling_s=2.0)))
            b.tell(*(RolloutScored(rollout_id=one.rollout_id, reward=1.0) for one in b.of(ScoreRollout)))
        step = b.coordinator.status().training_step
        if step is not None:
            b.train(step)
    trained: int = b.coordinator.status().trained_steps
    return trained


def test_silent_nodes_cost_the_run_little(bench: BenchOf) -> None:
    alone = _steps_in_1200_s(bench)
    assert alone == 150
    assert _steps_in_1200_s(bench, silent=1) >= 0.95 * alone
    assert _steps_in_1200_s(bench, silent=10) >= 0.85 * alone


def test_a_window_grows_with_timely_results_and_shrinks_without_them(bench: BenchOf) -> None:
    b = bench(groups_per_step=50, group_size=4, steps=9, first_window=4, deadline_s=60.0)
    b.node("a", capacity=4096)
    held = b.coordinator.status().leased_by_node
    seen, returned = [held["a"]], 0
    for _ in range(3):
        for lease in list(b.leases.values()):
            del b.leases[lease.lease_id]
            b.deliver(lease)
            returned += len(lease.indices)
            assert held["a"] <= 4 + returned, "it claims 4,096"
        seen.append(held["a"])
    assert seen[0] == 4 and all(more > 1.5 * less for less, more in pairwise(seen))
    b.now += 60.0
    b.tell(Tick())
    assert held["a"] == seen[-1] + 1, "all is overdue, so the node gets one rollout at once"
    b.now += 60.0
    b.tell(Tick())
    assert held["a"] == seen[-1] + 2
    b.deliver(b.of(SendLease)[-1])
    assert held["a"] >= seen[-1] + 2, "the window grows again at once"


def test_all_that_have_returned_nothing_hold_a_share_of_a_step_together(bench: BenchOf) -> None:
    b = bench(groups_per_step=8, group_size=4, steps=9, first_window=4)
    for number in range(3):
        b.node(f"new{number}", capacity=4096)
    held = b.coordinator.status().leased_by_node
    assert sum(held.values()) == 12, "no other node is there"
    b.deliver(b.leases[1])
    for number in range(3, 9):
        b.node(f"new{number}", capacity=4096)
    assert sum(count for node_id, count in held.items() if node_id != "new0") == 8, "a step has 32 rollouts"
    assert held["new0"] > 4


def test_keys_that_are_honest_once_and_then_silent_take_no_more_than_twice_what_they_return(bench: BenchOf) -> None:
    b = bench(groups_per_step=50, group_size=4, steps=9, first_window=4, max_staleness=2)
    b.node("known", capacity=8)
    b.deliver(b.leases[1])
    for number in range(40):
        b.node(f"key{number}", capacity=4096)
        (first,) = (lease for lease in b.leases.values() if lease.node_id == f"key{number}")
        b.deliver(first)
    held = b.coordinator.status().leased_by_node
    assert sum(count for node_id, count in held.items() if node_id != "known") == 2 * 40


@pytest.mark.parametrize("others", [0, 1])
def test_failed_work_goes_to_a_stranger_only_if_no_other_node_is_there(bench: BenchOf, others: int) -> None:
    """Rollouts that failed on one node wait for another known node, even a busy one. Strangers (nodes without results)
    get them only if no other known node is connected.
    """
    b = bench(groups_per_step=1, group_size=2, steps=9, max_staleness=8)
    b.learner()
    for number in range(1 + others):
        b.node(f"known{number}", capacity=2)
        b.now += 1.0
        b.deliver(b.of(SendLease)[0])
    b.now += 1.0
    b.train(1)
    failing = next(lease for lease in reversed(b.leases.values()) if lease.node_id == "known0")
    b.tell(NodeConnected(node_id="new"))
    b.tell(LeaseGivenBack(node_id="known0", lease_id=failing.lease_id, indices=failing.indices[:1], reason="busy"))
    b.tell(NodeReported(node_id="new", capacity=1, policy_version=b.coordinator.published_version))
    again = [lease for lease in b.of(SendLease) if lease.group_id == failing.group_id]
    assert [lease.node_id for lease in again] == ["new"] * (not others)


def test_a_reconnected_node_is_sent_its_leases_again(bench: BenchOf) -> None:
    """Leases sent into a dying connection are lost, so the hub sends them again; nodes that already hold a lease ignore
    its repetition.
    """
    b = bench(groups_per_step=1, steps=1, group_size=4, deadline_s=60.0)
    b.node("a")
    b.tell(b.arrival(b.leases[1], 2), NodeDisconnected(node_id="a"))
    b.now += 20.0
    b.tell(NodeConnected(node_id="a"))
    assert b.of(SendLease) == [], "the node may first say what it gives back"
    b.tell(NodeReported(node_id="a", capacity=100, policy_version=0))
    (again,) = b.of(SendLease)
    assert (again.lease_id, again.indices, again.seed, again.deadline_s) == (1, (0, 1, 3), b.leases[1].seed, 40.0)
    b.tell(NodeReported(node_id="a", capacity=100, policy_version=0))
    assert b.of(SendLease) == []


def test_silent_strangers_that_come_and_go_leave_no_state(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, steps=1)
    for number in range(100):
        b.tell(NodeConnected(node_id=f"n{number}"), NodeDisconnected(node_id=f"n{number}"))
    assert (b.coordinator._outstanding._unsent, b.coordinator._nodes.num_known) == (set(), 0)


def test_the_work_of_a_node_that_left_is_leased_to_another_later(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, steps=1)
    b.node("a")
    b.node("b")
    b.tell(NodeDisconnected(node_id="a"))
    b.now += LEFT_S - 0.1
    b.tell(Tick())
    assert b.of(SendLease) == []
    assert b.coordinator.due_at() == pytest.approx(b.now + 0.1)
    b.now += 0.1
    b.tell(Tick())
    assert [(lease.node_id, lease.indices) for lease in b.of(SendLease)] == [("b", (0, 1))]
    assert b.of(RolloutsDropped) == [], "the node may still come back with the rollouts"


def _proven(bench: BenchOf, seconds: dict[str, float], **settings: Any) -> Any:
    """Return a run whose nodes have all returned rollouts of two tokens. `seconds`: by node, the time of a rollout."""
    b = bench(
        **{"groups_per_step": 4, "group_size": 4, "steps": 99, "max_staleness": 1, "deadline_s": 600.0, **settings}
    )
    b.learner()
    for node_id in seconds:
        b.node(node_id, capacity=4)
    ready = {}
    for _ in range(400):
        for lease in list(b.leases.values()):
            at = ready.setdefault(lease.lease_id, b.now + seconds[lease.node_id])
            if b.now >= at:
                del b.leases[lease.lease_id]
                payload = replace(PAYLOAD, sampling_s=seconds[lease.node_id])
                b.tell(*(b.arrival(lease, index, payload=payload) for index in lease.indices))
                b.tell(*(RolloutScored(rollout_id=one.rollout_id, reward=1.0) for one in b.of(ScoreRollout)))
        b.now += 0.5
        b.tell(Tick())
        if b.coordinator.status().training_step == 1:
            break
    b.now += 4.0
    b.train(1)
    for node_id in seconds:
        b.tell(NodeReported(node_id=node_id, capacity=4, policy_version=1))
    return b


def test_a_rollout_that_stalls_is_leased_to_another_node_as_well(bench: BenchOf) -> None:
    b = _proven(bench, {"a": 1.0, "b": 1.0})
    stalled = max((lease for lease in b.leases.values() if lease.node_id == "a"), key=lambda lease: lease.lease_id)
    leased_at, again = b.now, None
    for _ in range(100):
        of_b = [lease for lease in b.leases.values() if lease.node_id == "b"]
        same = [lease for lease in of_b if lease.group_id == stalled.group_id]
        again = next((lease for lease in same if set(lease.indices) & set(stalled.indices)), None)
        if again is not None:
            break
        for lease in of_b:
            del b.leases[lease.lease_id]
            b.deliver(lease)
        b.now += 0.5
        b.tell(Tick())
    assert b.now - leased_at <= 10.0, "far sooner than its deadline"
    assert again is not None and set(again.indices) <= set(stalled.indices) and again.seed == stalled.seed
    b.deliver(stalled)
    assert [r.state for r in b.receipts("a")][:1] == [ReceiptState.RECEIVED], "the first valid result counts"


def test_work_is_asked_for_as_late_as_keeps_the_learner_busy(bench: BenchOf) -> None:
    """Steps take 10 s and rollouts 1 s. Rollouts leased as early as possible would wait 9 s for their step and become
    stale, so the hub must lease them later.
    """
    b = bench(steps=99, groups_per_step=1, group_size=4, max_staleness=2, deadline_s=600.0)
    b.learner()
    b.node("a", capacity=4)
    leased_at: dict[int, float] = {}
    begun: dict[int, float] = {}
    while b.coordinator.status().trained_steps < 8:
        for lease in list(b.leases.values()):
            if b.now - leased_at.setdefault(lease.lease_id, b.now) >= 1.0:
                del b.leases[lease.lease_id]
                b.deliver(lease)
        step = b.coordinator.status().training_step
        if step is not None and b.now - begun.setdefault(step, b.now) >= 10.0:
            b.train(step)
            b.tell(NodeReported(node_id="a", capacity=4, policy_version=step))
        b.now += 0.25
        b.tell(Tick())
    starts = list(begun.values())
    assert [later - earlier for earlier, later in pairwise(starts)][3:] == [10.25] * 4, "the learner never waits"
    waits = [min(start - at for at in leased_at.values() if at < start) for start in starts[4:]]
    assert all(1.0 <= wait <= 5.0 for wait in waits)


def test_during_the_first_step_the_base_does_not_sample_the_whole_bound(bench: BenchOf) -> None:
    """Rollouts take 1 s and the first step 100 s. A node that sampled all the time would fill the whole staleness bound
    (100 steps) with rollouts of version 0, the base model. Only the next few steps' rollouts may be sampled.
    """
    b = bench(steps=200, groups_per_step=1, group_size=4, max_staleness=100, deadline_s=600.0)
    b.learner()
    b.node("a", capacity=4)
    leased_at: dict[int, float] = {}
    begun: dict[int, float] = {}
    while b.coordinator.status().trained_steps < 3:
        for lease in list(b.leases.values()):
            if b.now - leased_at.setdefault(lease.lease_id, b.now) >= 1.0:
                del b.leases[lease.lease_id]
                b.deliver(lease)
        step = b.coordinator.status().training_step
        if step is not None and b.now - begun.setdefault(step, b.now) >= 100.0:
            ahead = b.coordinator.status()
            assert 2 <= ahead.groups_buffered + ahead.groups_planned <= 8, "the next step's batch is ready"
            b.train(step)
            b.tell(NodeReported(node_id="a", capacity=4, policy_version=step))
        b.now += 0.25
        b.tell(Tick())
    assert [later - earlier for earlier, later in pairwise(begun.values())] == [100.25] * 2, "the learner never waits"


def test_a_node_cannot_return_anothers_lease(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, steps=1)
    b.node("a")
    b.node("b")
    b.tell(LeaseGivenBack(node_id="b", lease_id=1, indices=(0, 1, 77), reason="mischief"))
    assert b.effects == []


def test_a_lost_connection_keeps_its_leases_until_the_deadline(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, steps=1)
    b.node("a")
    b.tell(NodeDisconnected(node_id="a"))
    b.node("b")
    assert b.of(SendLease) == []
    b.tell(NodeConnected(node_id="a"), b.arrival(b.leases[1], 0))
    assert [r.state for r in b.receipts("a")] == [ReceiptState.RECEIVED]
    b.now += 60.0
    b.tell(Tick())
    assert [(lease.node_id, lease.indices) for lease in b.of(SendLease)] == [("b", (1,))]


def test_a_lease_names_the_newest_published_version_that_the_node_has(bench: BenchOf) -> None:
    b = bench(max_staleness=3, groups_per_step=1, steps=8)
    b.learner()
    b.node("a", capacity=2)
    b.deliver_group(0)
    b.train(1)
    b.deliver_group(1)
    assert {lease.policy_version for lease in b.leases.values()} == {0}
    b.tell(NodeReported(node_id="a", capacity=2, policy_version=1))
    b.deliver_group(2)
    assert b.of(SendLease)[-1].policy_version == 1
    b.tell(NodeReported(node_id="a", capacity=4, policy_version=77))
    assert b.of(SendLease)[-1].policy_version == 1, "an unpublished version is never leased"


def test_a_node_whose_version_is_too_old_for_its_place_gets_nothing(bench: BenchOf) -> None:
    b = bench(max_staleness=1, groups_per_step=1, steps=8)
    b.learner()
    b.node("a", capacity=100)
    assert [lease.group_id for lease in b.leases.values()] == [0, 1]
    b.deliver_group(0)
    b.train(1)
    assert b.of(SendLease) == [], "group 2 is consumed at version 2 or later"
    b.tell(NodeReported(node_id="a", capacity=100, policy_version=1))
    assert [(lease.group_id, lease.policy_version) for lease in b.of(SendLease)] == [(2, 1)]


def test_a_lease_equals_its_record(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, steps=1)
    b.node("a")
    (record,), (sent,) = b.of(RolloutsLeased), b.of(SendLease)
    assert (record.lease_id, record.node_id, record.group_id, record.indices) == (1, "a", 0, (0, 1))
    assert (sent.lease_id, sent.node_id, sent.group_id, sent.indices) == (1, "a", 0, (0, 1))
    assert record.deadline == b.now + sent.deadline_s == b.now + 60.0


def test_a_rejected_index_goes_to_another_node(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, steps=1)
    b.node("a")
    b.node("b")
    b.deliver(b.leases[1], score=False)
    b.tell(RolloutRejected(rollout_id="1-1", reason=DropReason.INVALID, detail="not drawn from the seed"))
    assert [(lease.node_id, lease.indices) for lease in b.of(SendLease)] == [("b", (1,))]


def test_the_next_turn_is_a_lease_of_its_own(bench: BenchOf) -> None:
    b = bench(group_size=2, groups_per_step=1, steps=1, multi_turn=True)
    b.node("a", capacity=8)
    b.go_on(b.leases[1])
    first, second = b.of(SendLease)
    assert [(lease.indices, lease.turn) for lease in (first, second)] == [((0,), 1), ((1,), 1)]
    assert {first.seed, second.seed} == {derive_seed(100, 1)} and b.leases[1].seed == 100
    assert [(record.indices, record.turn) for record in b.of(RolloutsLeased)] == [((0,), 1), ((1,), 1)]
    b.go_on(first)
    (third,) = b.of(SendLease)
    assert (third.indices, third.turn, third.seed) == ((0,), 2, derive_seed(100, 2))


def test_later_turns_come_before_new_groups_and_the_furthest_first(bench: BenchOf) -> None:
    b = bench(group_size=2, groups_per_step=2, steps=1, multi_turn=True)
    b.node("a", capacity=2)
    b.tell(b.arrival(b.leases[1], 0))
    assert [(lease.group_id, lease.indices) for lease in b.of(SendLease)] == [(1, (0,))]
    b.tell(RolloutContinued(rollout_id="1-0", observation_ids=np.zeros(1, np.int32)))
    b.tell(b.arrival(b.leases[1], 1))
    assert [(lease.group_id, lease.indices, lease.turn) for lease in b.of(SendLease)] == [(0, (0,), 1)]
    third = b.of(SendLease)[0]
    b.tell(RolloutContinued(rollout_id="1-1", observation_ids=np.zeros(1, np.int32)))
    b.tell(NodeReported(node_id="a", capacity=0, policy_version=0))
    b.go_on(third)
    assert b.of(SendLease) == []
    b.tell(NodeReported(node_id="a", capacity=2, policy_version=0))
    assert [(lease.indices, lease.turn) for lease in b.of(SendLease)] == [((0,), 2)]


def test_a_multi_turn_run_leases_to_a_node_with_room_for_one(bench: BenchOf) -> None:
    b = bench(group_size=4, groups_per_step=1, steps=1, multi_turn=True)
    b.node("a", capacity=4)
    (lease,) = b.leases.values()
    b.tell(b.arrival(lease, 2))
    b.tell(RolloutContinued(rollout_id="1-2", observation_ids=np.zeros(1, np.int32)))
    assert [(again.indices, again.turn) for again in b.of(SendLease)] == [((2,), 1)]


def test_a_large_step_is_leased_in_parts_so_that_other_events_are_handled(bench: BenchOf) -> None:
    num = 3 * LEASED_AT_ONCE
    b = bench(groups_per_step=num, group_size=1, steps=1, prepare=False)
    asked = [effect.group_id for effect in b.effects if isinstance(effect, PrepareGroup)] or range(num)
    b.tell(*(GroupPrepared(group_id=group_id, seed=group_id) for group_id in asked))
    b.node("a", capacity=num)
    most = len(b.leases)
    for _ in range(5):
        if b.coordinator.due_at() != b.now:
            break
        before = len(b.leases)
        b.tell(Tick())
        most = max(most, len(b.leases) - before)
    assert most == LEASED_AT_ONCE and len(b.leases) == num
