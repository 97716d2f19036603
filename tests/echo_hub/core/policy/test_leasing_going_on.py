"""Leases whose node continues the tokens that an earlier lease has sampled, called their prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from echo_hub.core.accounting.effects import RevokeLease, RolloutsDropped, ScoreRollout, SendLease, StepPlanned
from echo_hub.core.accounting.events import (
    EvaluationWanted,
    LearnerReady,
    LeaseGivenBack,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    RolloutRejected,
    RolloutsBegun,
    RolloutScored,
    StepDone,
    Tick,
    VersionPublished,
)
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot, GroupRow, UnfinishedRollout
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.core.policy.outstanding import LEFT_S
from echo_shared.records.rollout import DrawnSpan, RolloutPayload
from echo_shared.wire.messages import DropReason, FinishReason, ReceiptState

BenchOf = Callable[..., Any]


def begun(bench: BenchOf, *, proven: bool = True, **settings: Any) -> tuple[Any, SendLease]:
    """Return a run with one group of three: node a returned index 0 and still holds the others. `proven`: index 0 is
    scored, so node a is trusted.
    """
    b = bench(**{"groups_per_step": 1, "group_size": 3, "steps": 1, "deadline_s": 60.0, **settings})
    b.node("a")
    lease = b.leases[1]
    b.tell(b.arrival(lease, 0))
    if proven:
        b.tell(RolloutScored(rollout_id="1-0", reward=1.0))
    return b, lease


def give_back(b: Any, lease: SendLease, *indices: int) -> None:
    b.tell(LeaseGivenBack(node_id=lease.node_id, lease_id=lease.lease_id, indices=indices, reason="on battery"))


def test_a_first_draw_begins_at_its_first_token(bench: BenchOf) -> None:
    _, lease = begun(bench)
    assert lease.goes_on == ()


def test_a_returned_rollout_is_continued(bench: BenchOf) -> None:
    b, lease = begun(bench)
    b.node("b")
    give_back(b, lease, 1)
    (again,) = b.of(SendLease)
    assert (again.node_id, again.indices, again.goes_on) == ("b", (1,), ((1, 1),))
    give_back(b, again, 1)
    assert b.of(SendLease) == [], "both nodes rest"
    b.now += 1.0
    b.tell(Tick())
    (third,) = b.of(SendLease)
    assert (third.node_id, third.goes_on) == ("a", ((1, 1),)), "tokens added by b, which is not proven, are left out"


def test_the_prefix_of_a_node_that_left_is_continued(bench: BenchOf) -> None:
    b, _ = begun(bench)
    b.node("b")
    b.tell(NodeDisconnected(node_id="a"))
    b.now += LEFT_S
    b.tell(Tick())
    (again,) = b.of(SendLease)
    assert (again.node_id, again.seed, again.goes_on) == ("b", b.leases[1].seed, ((1, 1), (2, 1)))
    assert b.of(RolloutsDropped) == [], "the node that left may come back with it and win"


def test_a_prefix_of_an_unpublished_version_is_not_continued(bench: BenchOf) -> None:
    """After a restore from a backup only the newest version is published. A node cannot fetch the prefix's older
    version, so it would return the lease.
    """
    held = UnfinishedRollout(
        rollout_id="1-0",
        group_id=1,
        lease_id=1,
        index=0,
        node_id="a",
        policy_version=3,
        deadline=1_060.0,
        state=ReceiptState.LEASED,
        reward=None,
    )
    snapshot = CoordinatorSnapshot(
        next_group_id=2,
        next_lease_id=2,
        trained_steps=4,
        published_version=4,
        groups=(GroupRow(group_id=1, seed=1),),
        rollouts=(held,),
    )
    b = bench(snapshot, groups_per_step=1, group_size=1, steps=9, max_staleness=4)
    b.tell(LearnerReady(policy_version=4))
    b.node("a", version=4)
    give_back(b, b.leases[1], 0)
    b.now += 1.0
    b.tell(Tick())
    (again,) = (lease for lease in b.leases.values() if lease.group_id == 1 and lease.lease_id > 1)
    assert (again.policy_version, again.goes_on) == (4, ())


def test_late_and_overdue_rollouts_are_continued(bench: BenchOf) -> None:
    """Late rollouts (even the longest completion would have arrived by now) and overdue ones (past their deadline) are
    leased to another node, which continues the tokens that the hub has received.
    """
    for wait_s in (20.0, 60.0):
        b, _ = begun(bench)
        b.node("b")
        b.now += wait_s
        b.tell(Tick())
        for again in b.of(SendLease):
            assert (again.node_id, again.goes_on) == ("b", ((1, 1),)), "a stranger is given one"
    assert b.of(SendLease), "an overdue rollout is leased again"


def test_a_lease_sent_again_continues_its_own_prefixes(bench: BenchOf) -> None:
    """Reconnected nodes get their own lease again and continue from the tokens that the hub received, even if they are
    not proven.
    """
    b, _ = begun(bench, proven=False)
    b.tell(NodeDisconnected(node_id="a"), NodeConnected(node_id="a"))
    b.tell(NodeReported(node_id="a", capacity=9, policy_version=0))
    (again,) = b.of(SendLease)
    assert (again.lease_id, again.goes_on) == (1, ((1, 1), (2, 1)))


def test_a_fresh_key_plants_no_tokens(bench: BenchOf) -> None:
    b, lease = begun(bench, proven=False)
    b.node("b")
    give_back(b, lease, 1)
    (again,) = b.of(SendLease)
    assert (again.node_id, again.goes_on) == ("b", ())
    b.tell(RolloutScored(rollout_id="1-0", reward=1.0))
    b.node("c")
    give_back(b, lease, 2)
    assert [one.goes_on for one in b.of(SendLease)] == [((2, 1),)], "the node is proven by now"


def test_a_node_that_gets_its_returned_work_again_continues_its_own_prefix(bench: BenchOf) -> None:
    b, lease = begun(bench, proven=False)
    give_back(b, lease, 1)
    b.now += 1.0
    b.tell(Tick())
    assert [(one.node_id, one.goes_on) for one in b.of(SendLease)] == [("a", ((1, 1),))]


def test_a_rollout_the_scorer_failed_on_restarts_at_its_first_token(bench: BenchOf) -> None:
    b, lease = begun(bench)
    b.tell(b.arrival(lease, 1))
    b.tell(RolloutRejected(rollout_id="1-1", reason=DropReason.SCORER_FAILED, detail="no"))
    (again,) = b.of(SendLease)
    assert (again.indices, again.goes_on) == ((1,), ()) and again.seed != lease.seed
    b.node("b")
    give_back(b, again, 1)
    (third,) = b.of(SendLease)
    assert (third.seed, third.goes_on) == (again.seed, ((1, again.lease_id),)), (
        "only a prefix with the same seed is continued"
    )


def test_an_invalid_rollout_restarts_at_its_first_token(bench: BenchOf) -> None:
    b, lease = begun(bench)
    b.node("b")
    b.tell(b.arrival(lease, 1))
    b.tell(RolloutRejected(rollout_id="1-1", reason=DropReason.INVALID, detail="not drawn"))
    (again,) = b.of(SendLease)
    assert (again.node_id, again.seed, again.goes_on) == ("b", lease.seed, ())


def test_a_rollout_without_its_given_prefix_is_invalid(bench: BenchOf) -> None:
    b, lease = begun(bench)
    b.tell(b.arrival(lease, 1, problem="other tokens than were given"))
    (dropped,) = b.of(RolloutsDropped)
    assert (dropped.rollout_ids, dropped.reason) == (("1-1",), DropReason.INVALID)
    assert dropped.detail == "other tokens than were given"
    assert b.of(ScoreRollout) == []


def test_the_next_turn_begins_at_its_first_token(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, group_size=2, steps=1, multi_turn=True)
    b.node("a")
    b.go_on(b.leases[1])
    turns = b.of(SendLease)
    assert [(one.turn, one.goes_on) for one in turns] == [(1, ()), (1, ())]
    b.node("b")
    give_back(b, turns[0], *turns[0].indices)
    ((index,), (again,)) = turns[0].indices, b.of(SendLease)
    assert (again.turn, again.goes_on) == (1, ((index, turns[0].lease_id),))


def test_an_evaluations_completions_are_continued(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, group_size=2, steps=1, evaluation_problems=2)
    b.node("a")
    b.tell(EvaluationWanted(policy_version=0))
    wanted = b.of(SendLease)
    assert wanted and all(one.goes_on == () for one in wanted)
    b.deliver(b.leases[1])
    b.node("b")
    give_back(b, wanted[0], 0)
    assert [(one.node_id, one.goes_on) for one in b.of(SendLease)] == [("b", ((0, wanted[0].lease_id),))]


def test_the_hubs_own_leases_begin_at_their_first_token(bench: BenchOf) -> None:
    b = bench(mode="colocated", groups_per_step=1, group_size=2, steps=1)
    b.learner()
    b.node(HUB_NODE_ID)
    b.tell(b.arrival(b.leases[1], 0), RolloutScored(rollout_id="1-0", reward=1.0))
    give_back(b, b.leases[1], 1)
    assert [one.goes_on for one in b.of(SendLease)] == [()]


@pytest.mark.parametrize("state", [ReceiptState.LEASED, ReceiptState.DROPPED])
def test_after_a_restart_rollouts_that_nodes_hold_are_continued(bench: BenchOf, state: ReceiptState) -> None:
    held = [
        UnfinishedRollout(
            rollout_id="7-0",
            lease_id=7,
            node_id="a",
            group_id=0,
            index=0,
            policy_version=0,
            deadline=2_000.0,
            state=state,
            reward=None,
        )
    ]
    rollouts = tuple(row for row in held if row.state is ReceiptState.LEASED)
    groups = (GroupRow(group_id=0, seed=9),)
    snapshot = CoordinatorSnapshot(next_group_id=1, next_lease_id=8, groups=groups, rollouts=rollouts)
    b = bench(snapshot, groups_per_step=1, group_size=2, steps=1)
    b.node("a")
    first = next(lease for lease in b.leases.values() if lease.lease_id >= 8)
    b.deliver(first)
    b.node("b")
    if rollouts:
        give_back(b, b.leases[7], 0)
        assert [one.goes_on for one in b.of(SendLease)] == [((0, 7),)]
    else:
        assert first.goes_on == ()


@pytest.mark.parametrize("bound", [1, 2])
def test_a_prefix_of_an_older_version_is_continued_with_that_version(bench: BenchOf, bound: int) -> None:
    """Step 2 may still use version 0, so node b finishes node a's prefix with version 0, although node b also has
    version 1.
    """
    b = bench(groups_per_step=1, group_size=2, steps=9, max_staleness=bound)
    b.node("a", capacity=4)
    begun, returned = b.leases[1], b.leases[2]
    b.deliver(returned)
    b.learner()
    b.train(1)
    b.node("b", version=1)
    b.deliver(next(lease for lease in b.leases.values() if lease.node_id == "b"))
    b.tell(RolloutsBegun(rollout_ids=(f"{begun.lease_id}-0", "99-0")))
    give_back(b, begun, 0, 1)
    again = [lease for lease in b.leases.values() if lease.node_id == "b" and lease.group_id == begun.group_id]
    assert [(lease.policy_version, lease.goes_on) for lease in again] == [(0, ((0, 1),))], "node b has capacity for one"


def test_a_lease_without_sampled_tokens_is_not_pinned_to_its_version(bench: BenchOf) -> None:
    """Leases without any sampled token leave nothing to continue, so the next node starts with the newest version."""
    b = bench(groups_per_step=1, group_size=2, steps=9, max_staleness=2)
    b.node("a", capacity=4)
    begun, returned = b.leases[1], b.leases[2]
    b.deliver(returned)
    b.learner()
    b.train(1)
    b.node("b", version=1)
    b.deliver(next(lease for lease in b.leases.values() if lease.node_id == "b"))
    give_back(b, begun, 0, 1)
    again = [lease for lease in b.leases.values() if lease.node_id == "b" and lease.group_id == begun.group_id]
    assert [lease.policy_version for lease in again] == [1]


def test_tokens_of_a_node_proven_since_are_continued_too(bench: BenchOf) -> None:
    b, _ = begun(bench)
    b.node("b")
    b.tell(NodeDisconnected(node_id="a"))
    b.now += LEFT_S
    b.tell(Tick())
    (second,) = b.of(SendLease)
    assert (second.node_id, second.goes_on) == ("b", ((1, 1), (2, 1)))
    b.tell(b.arrival(second, 1))
    b.tell(RolloutScored(rollout_id=f"{second.lease_id}-1", reward=1.0))
    b.node("c")
    b.tell(NodeDisconnected(node_id="b"))
    b.now += LEFT_S
    b.tell(Tick())
    (third,) = b.of(SendLease)
    assert (third.node_id, third.goes_on) == ("c", ((2, second.lease_id),))


def mixing(bench: BenchOf, **settings: Any) -> tuple[Any, SendLease]:
    """Return a run and a lease as `begun` does. The run moves unfinished rollouts to new versions (`interrupts`); index
    0 is of version 0.
    """
    b, lease = begun(bench, **{"steps": 3, "max_staleness": 1, "interrupts": True, **settings})
    b.tell(LearnerReady(policy_version=0))
    return b, lease


def newer(b: Any, version: int) -> None:
    b.tell(VersionPublished(policy_version=version))
    for node_id in ("a", "b"):
        b.tell(NodeReported(node_id=node_id, capacity=100, policy_version=version))


def test_an_older_versions_prefix_is_continued_with_a_newer_version(bench: BenchOf) -> None:
    b, lease = mixing(bench)
    b.node("b")
    newer(b, 1)
    give_back(b, lease, 1)
    (again,) = [one for one in b.of(SendLease) if one.group_id == lease.group_id]
    assert (again.policy_version, again.goes_on) == (1, ((1, 1),))
    give_back(b, again, 1)


def test_without_interruption_the_same_version_continues(bench: BenchOf) -> None:
    b, lease = mixing(bench, interrupts=False)
    b.tell(RolloutsBegun(rollout_ids=(f"{lease.lease_id}-1",)))
    b.node("b")
    newer(b, 1)
    give_back(b, lease, 1)
    (again,) = [one for one in b.of(SendLease) if one.group_id == lease.group_id]
    assert (again.policy_version, again.goes_on) == (0, ((1, 1),))


def test_a_lease_keeps_indices_that_are_fresh_and_drops_the_stale_ones(bench: BenchOf) -> None:
    """A lease holds two rollouts of a group, by their index. The staleness bound is 1. Rollout 0 was begun with version
    0 and is continued; rollout 1 begins with version 1. When rollout 0 becomes stale, the hub drops it alone. If it
    revoked the lease, rollout 1 would end as well.
    """
    b = bench(groups_per_step=1, group_size=2, steps=9, max_staleness=1, interrupts=True)
    b.tell(LearnerReady(policy_version=0))
    b.node("a")
    b.deliver_group(1)
    b.train(1)
    b.tell(b.arrival(b.leases[1], 1), RolloutRejected(rollout_id="1-1", reason=DropReason.INVALID, detail="not drawn"))
    give_back(b, b.leases[1], 0)
    b.now += 30.0
    b.tell(NodeReported(node_id="a", capacity=100, policy_version=1))
    mixed, other = b.leases[3], b.leases[4]
    assert (mixed.indices, mixed.policy_version, mixed.goes_on) == ((0, 1), 1, ((0, 1),))
    b.deliver(other)  # Step 2 is now planned, and step 3 accepts no token of version 0.
    assert [dropped.rollout_ids for dropped in b.of(RolloutsDropped)] == [("3-0",)]
    (again,) = (lease for lease in b.of(SendLease) if lease.group_id == 0)
    assert (again.indices, again.goes_on) == ((0,), ())
    assert b.of(RevokeLease) == []


def test_the_bound_holds_for_the_oldest_token(bench: BenchOf) -> None:
    """Step 3 accepts no token older than version 1, even if the rollout's last tokens are newer."""
    b = bench(groups_per_step=1, group_size=2, steps=4, max_staleness=1, interrupts=True)
    b.tell(LearnerReady(policy_version=0))
    b.node("a")
    lease = b.leases[1]
    versions = {"policy_version_start": 0, "policy_version_end": 1}
    newer(b, 1)
    b.tell(*(b.arrival(lease, index, **versions) for index in lease.indices))
    b.tell(*(RolloutScored(rollout_id=effect.rollout_id, reward=1.0) for effect in b.of(ScoreRollout)))
    (planned,) = b.of(StepPlanned)
    assert (planned.step, planned.staleness) == (1, (0,))
    second = b.leases[2]
    assert second.policy_version == 0
    b.tell(StepDone(step=1, metrics={}))
    newer(b, 2)
    b.tell(b.arrival(second, 0, policy_version_start=0, policy_version_end=2))
    b.tell(b.arrival(second, 1, policy_version_start=2, policy_version_end=2))
    b.tell(*(RolloutScored(rollout_id=f"2-{index}", reward=1.0) for index in (0, 1)))
    (planned,) = b.of(StepPlanned)
    assert (planned.step, planned.staleness) == (2, (1,)), "a rollout is as old as its oldest token"


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (0, 2, "policy versions 0 to 2, newest published 1"),
        (1, 0, "policy versions 1 to 0, newest published 1"),
        (0, 1, ""),
        (1, 1, ""),
        (0, 0, ""),
    ],
)
def test_versions_rise_up_to_the_newest_published(bench: BenchOf, first: int, last: int, said: str) -> None:
    b, lease = mixing(bench)
    newer(b, 1)
    b.tell(b.arrival(lease, 1, policy_version_start=first, policy_version_end=last))
    assert [(one.reason, one.detail) for one in b.of(RolloutsDropped)] == ([(DropReason.INVALID, said)] if said else [])


def test_an_evaluation_uses_only_its_own_version(bench: BenchOf) -> None:
    b = bench(steps=3, max_staleness=1, interrupts=True, evaluation_problems=1)
    b.tell(EvaluationWanted(policy_version=0))
    b.node("a", version=0)
    lease = next(lease for lease in b.leases.values() if EvaluationGroup.of(lease.group_id))
    newer(b, 1)
    b.tell(b.arrival(lease, 0, policy_version_end=1))
    assert [one.detail for one in b.of(RolloutsDropped)] == ["last policy version 1 instead of 0"]


def test_a_prefix_too_old_for_training_is_not_continued(bench: BenchOf) -> None:
    snapshot = CoordinatorSnapshot(
        next_group_id=1,
        next_lease_id=2,
        groups=(GroupRow(group_id=0, seed=1),),
        rollouts=tuple(
            UnfinishedRollout(
                rollout_id=f"1-{index}",
                lease_id=1,
                node_id="a",
                group_id=0,
                index=index,
                policy_version=0,
                deadline=1_060.0,
                state=ReceiptState.LEASED,
                reward=None,
            )
            for index in (0, 1)
        ),
        trained_steps=2,
        published_version=2,
    )
    for bound, goes_on in ((1, ()), (2, ((0, 1), (1, 1)))):
        b = bench(snapshot, groups_per_step=1, group_size=2, steps=4, max_staleness=bound, interrupts=True)
        b.tell(LearnerReady(policy_version=2))
        b.node("a", version=2)
        b.tell(LeaseGivenBack(node_id="a", lease_id=1, indices=(0, 1), reason="owner"))
        b.now += 30.0
        b.tell(Tick())
        again = [lease for lease in b.leases.values() if lease.group_id == 0 and lease.lease_id > 1]
        assert [lease.goes_on for lease in again] == [goes_on]


def test_only_the_stale_rollouts_of_a_group_are_sampled_again(bench: BenchOf) -> None:
    """A restarted hub has forgotten which prefix (tokens of an earlier lease) each lease continues, so an honest node's
    prefix may be too old. Only the rollout with this prefix is sampled again.
    """
    rows = [
        UnfinishedRollout(
            rollout_id=f"1-{index}",
            lease_id=1,
            node_id="a",
            group_id=0,
            index=index,
            policy_version=2,
            deadline=1_060.0,
            state=ReceiptState.LEASED,
            reward=None,
        )
        for index in (0, 1)
    ]
    snapshot = CoordinatorSnapshot(
        next_group_id=1,
        next_lease_id=2,
        groups=(GroupRow(group_id=0, seed=1),),
        rollouts=tuple(rows),
        trained_steps=2,
        published_version=2,
    )
    b = bench(snapshot, groups_per_step=1, group_size=2, steps=4, max_staleness=1, interrupts=True)
    b.tell(LearnerReady(policy_version=2))
    b.node("a", version=2)
    lease = b.of(SendLease)[0] if b.of(SendLease) else b.leases[1]
    old, young = ({"policy_version_start": version, "policy_version_end": 2} for version in (0, 1))
    b.tell(b.arrival(lease, 0, **old))
    assert [(one.reason, one.detail) for one in b.of(RolloutsDropped)] == [
        (DropReason.STALE, "its first token was sampled with version 0")
    ]
    again = [one for one in b.of(SendLease) if one.group_id == 0]
    assert [(one.indices, one.goes_on) for one in again] == [((0,), ())]
    b.tell(b.arrival(lease, 1, **young))
    assert b.of(RolloutsDropped) == []


def test_a_nodes_pace_counts_only_its_own_tokens(bench: BenchOf) -> None:
    """Node b got a prefix of 100 tokens and sampled 10 more in a second; counting all 110 would make node b seem eleven
    times as fast.
    """
    b, lease = mixing(bench)
    b.node("b")
    newer(b, 1)
    give_back(b, lease, 1)
    (again,) = [one for one in b.of(SendLease) if one.group_id == lease.group_id]
    spans = (
        DrawnSpan(node_id="a", policy_version=0, num_tokens=100),
        DrawnSpan(node_id="b", policy_version=1, num_tokens=10),
    )
    long = np.zeros(110, np.int32)
    payload = RolloutPayload(
        completion_ids=long,
        behavior_logprobs=long.astype(np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=1.0,
        spans=spans,
    )
    b.now += 1.0
    b.tell(b.arrival(again, 1, policy_version_start=0, policy_version_end=1, payload=payload))
    assert b.coordinator._nodes._nodes["b"].pace.token_s == pytest.approx(0.1)
