"""Planning of steps, the staleness bound, and publication of versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from echo_hub.core.accounting.effects import (
    AnnounceVersion,
    BeginStep,
    FinishRun,
    GroupDropped,
    GroupOpened,
    PlannedGroup,
    PrepareGroup,
    PublishVersion,
    RevokeLease,
    RolloutsDropped,
    SendLease,
    SendTrained,
    StepPlanned,
    StepTrained,
    TrainStep,
    VersionRecorded,
)
from echo_hub.core.accounting.events import (
    LearnerLost,
    LearnerReady,
    NodeReported,
    RolloutScored,
    StepComputed,
    StepDone,
    Tick,
    VersionPublished,
)
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot, GroupRow, StepRow, UnfinishedRollout
from echo_hub.core.training import MAX_FLAT_BATCHES, MAX_REDRAWS
from echo_hub.core.trust.screening import StepScreen
from echo_shared.errors import LocalProtocolError
from echo_shared.wire.messages import DropReason, ReceiptState, rollout_id
from tests.echo_hub.core.conftest import PAYLOAD

BenchOf = Callable[..., Any]


def test_a_step_is_planned_once_the_learner_is_ready_and_enough_is_complete(bench: BenchOf) -> None:
    b = bench()
    b.node("a")
    b.deliver_group(0)
    b.deliver_group(1)
    assert b.of(StepPlanned) == []
    b.learner()
    (planned,) = b.of(StepPlanned)
    assert (planned.step, planned.group_ids) == (1, (0, 1))
    assert planned.rollout_ids == ("1-0", "1-1", "2-0", "2-1")
    batch = (PlannedGroup(0, ("1-0", "1-1"), (1.0, 1.0)), PlannedGroup(1, ("2-0", "2-1"), (1.0, 1.0)))
    assert b.of(BeginStep) == [BeginStep(step=1, batch=batch)]
    assert b.of(TrainStep) == [TrainStep(step=1)]


def test_the_batch_does_not_depend_on_the_order_of_arrival(bench: BenchOf) -> None:
    b = bench(mode="sequential")
    b.node("a")
    b.learner()
    b.deliver_group(1)
    b.tell(*(b.arrival(b.leases[1], index) for index in (1, 0)))
    b.tell(RolloutScored(rollout_id="1-1", reward=0.0), RolloutScored(rollout_id="1-0", reward=0.0))
    (planned,) = b.of(StepPlanned)
    assert planned.rollout_ids == ("1-0", "1-1", "2-0", "2-1")


def test_a_trained_step_gives_receipts_and_a_version(bench: BenchOf) -> None:
    b = bench()
    b.node("a")
    b.learner()
    b.deliver_group(0)
    b.deliver_group(1)
    b.tell(StepDone(step=1, metrics={"loss": 0.25}))
    (trained,) = b.of(StepTrained)
    assert (trained.step, trained.metrics) == (1, {"loss": 0.25})
    assert [told.node_ids for told in b.of(SendTrained)] == [("a",) * 4]
    assert b.of(PublishVersion) == [PublishVersion(policy_version=1)]
    b.tell(VersionPublished(policy_version=1))
    assert b.of(VersionRecorded) == [VersionRecorded(policy_version=1, published_at=b.now)]
    assert b.of(AnnounceVersion) == [AnnounceVersion(policy_version=1)]


def test_groups_that_the_learner_left_out_are_dropped_whole_and_the_others_trained(bench: BenchOf) -> None:
    b = bench()
    b.node("a")
    b.learner()
    b.deliver_group(0)
    b.deliver_group(1)
    (planned,) = b.of(StepPlanned)
    b.tell(StepDone(step=1, metrics={}, screen=StepScreen(left_out=(1,))))
    (trained,) = b.of(StepTrained)
    (dropped,) = b.of(RolloutsDropped)
    assert dropped.reason is DropReason.SCREENED and len(dropped.rollout_ids) == 2
    assert (*trained.rollout_ids, *dropped.rollout_ids) == planned.rollout_ids
    assert [told.rollout_ids for told in b.of(SendTrained)] == [trained.rollout_ids]
    assert b.of(GroupDropped) == [GroupDropped(group_id=planned.group_ids[1], reason=DropReason.SCREENED)]
    assert b.of(PublishVersion) == [PublishVersion(policy_version=1)], "the version is published all the same"


def test_a_step_of_which_all_is_left_out_is_a_step(bench: BenchOf) -> None:
    b = bench(planned_snapshot(), groups_per_step=1)
    b.tell(LearnerReady(policy_version=3, screens={3: StepScreen(left_out=(0,))}))
    assert [(record.step, record.rollout_ids) for record in b.of(StepTrained)] == [(3, ())]
    assert [record.rollout_ids for record in b.of(RolloutsDropped)] == [("3-0", "3-1")]
    assert b.of(SendTrained) == [] and b.of(PublishVersion) == [PublishVersion(policy_version=3)]


def test_sequential_mode_leases_the_next_step_only_once_the_version_is_out(bench: BenchOf) -> None:
    b = bench(mode="sequential")
    b.node("a", version=0)
    b.learner()
    assert [lease.group_id for lease in b.leases.values()] == [0, 1]
    b.deliver_group(0)
    b.deliver_group(1)
    b.tell(StepDone(step=1, metrics={}))
    assert b.of(PrepareGroup) == [] and b.of(SendLease) == []
    b.tell(VersionPublished(policy_version=1))
    # The node may get a lease of version 1 before it has fetched that version.
    assert [(lease.group_id, lease.policy_version) for lease in b.of(SendLease)] == [(2, 1), (3, 1)]


def test_colocated_mode_samples_between_steps_and_needs_no_publication(bench: BenchOf) -> None:
    b = bench(mode="colocated", publish_every=3, steps=4)
    b.node("hub")
    b.node("a")
    assert b.leases == {}
    b.learner()
    assert [(lease.node_id, lease.policy_version) for lease in b.leases.values()] == [("hub", 0), ("hub", 0)]
    b.deliver_group(0)
    b.deliver_group(1)
    assert b.of(TrainStep) == [TrainStep(step=1)]
    b.tell(StepDone(step=1, metrics={}))
    assert b.of(PublishVersion) == []
    assert [(lease.node_id, lease.policy_version) for lease in b.of(SendLease)] == [("hub", 1), ("hub", 1)]


def test_the_learners_own_leases_are_sent_again_when_it_is_back(bench: BenchOf) -> None:
    b = bench(mode="colocated")
    b.node("hub")
    b.learner()
    b.tell(b.arrival(b.leases[1], 0))
    b.tell(LearnerLost())
    (dropped,) = b.of(RolloutsDropped)
    assert (dropped.rollout_ids, dropped.reason) == (("1-1", "2-0", "2-1"), DropReason.RETURNED)
    assert b.of(SendLease) == []
    b.learner()
    assert [(lease.group_id, lease.indices) for lease in b.of(SendLease)] == [(0, (1,)), (1, (0, 1))]


def test_the_next_step_is_handed_over_while_one_is_in_training(bench: BenchOf) -> None:
    b = bench(max_staleness=2, groups_per_step=1, steps=9)
    b.node("a")
    b.learner()
    b.deliver_group(0)
    assert b.of(TrainStep) == [TrainStep(step=1)]
    b.deliver_group(1)
    (planned,) = b.of(StepPlanned)
    assert (planned.step, planned.group_ids, planned.staleness) == (2, (1,), (1,)), "step 2 consumes at version 1"
    assert b.of(TrainStep) == [TrainStep(step=2)]
    assert (b.coordinator.status().training_step, b.coordinator.status().groups_planned) == (1, 2)
    b.deliver_group(2)
    assert b.of(StepPlanned) == [], "at most two steps are planned"
    b.tell(StepDone(step=1, metrics={}))
    assert b.of(PublishVersion) == [PublishVersion(policy_version=1)]
    assert b.of(TrainStep) == [TrainStep(step=3)]
    assert b.coordinator.status().training_step == 2


def test_a_batch_overtakes_an_open_group_only_for_a_learner_without_work(bench: BenchOf) -> None:
    """Staleness bound 1: once step 2 has its batch, no later step can train on rollouts of version 0. The coordinator
    may drop such rollouts only if the learner would otherwise idle.
    """
    b = bench(max_staleness=1, groups_per_step=1, steps=9)
    b.node("a")
    b.learner()
    b.tell(b.arrival(b.leases[1], 0))
    b.deliver_group(1)
    assert b.of(TrainStep) == [TrainStep(step=1)]
    b.train(1)
    b.tell(NodeReported(node_id="a", capacity=100, policy_version=1))
    b.deliver_group(2)
    assert b.of(TrainStep) == [TrainStep(step=2)]
    dropped = {(one.rollout_ids, one.reason) for one in b.of(RolloutsDropped)}
    assert dropped == {(("1-1",), DropReason.REVOKED), (("1-0",), DropReason.STALE)}
    assert b.of(GroupDropped) == []
    b = bench(max_staleness=2, groups_per_step=1, steps=9)
    b.node("a")
    b.learner()
    b.deliver_group(0)
    b.deliver_group(2)
    assert b.of(StepPlanned) == [], "group 1 is still open, and step 1 is being trained"
    b.deliver_group(1)
    assert [planned.group_ids for planned in b.of(StepPlanned)] == [(1,)]


def test_a_step_that_is_handed_over_early_takes_nothing_too_old_for_it(bench: BenchOf) -> None:
    """Rollouts of version 0 fit only step 1 under staleness bound 0. Step 2, though planned before step 1 ends, must
    not take them.
    """
    b = bench(max_staleness=0, groups_per_step=1, steps=9)
    b.node("a")
    b.learner()
    b.deliver_group(0)
    assert b.of(TrainStep) == [TrainStep(step=1)] and b.of(PrepareGroup) == []
    b.train(1)
    b.tell(NodeReported(node_id="a", capacity=100, policy_version=1))
    b.deliver_group(1)
    (planned,) = b.of(StepPlanned)
    assert (planned.step, planned.staleness) == (2, (0,))


def test_in_lock_step_nothing_is_handed_over_early(bench: BenchOf) -> None:
    for mode, node_id in (("sequential", "a"), ("colocated", "hub")):
        b = bench(mode=mode, groups_per_step=1)
        b.node(node_id)
        b.learner()
        b.deliver_group(0)
        assert b.of(TrainStep) == [TrainStep(step=1)] and b.of(SendLease) == []
        b.train(1)
        b.deliver_group(1)
        assert b.of(TrainStep) == [TrainStep(step=2)] and b.coordinator.status().training_step == 2


def test_publication_every_third_version_and_after_the_last(bench: BenchOf) -> None:
    b = bench(max_staleness=2, publish_every=3, groups_per_step=1, steps=4)
    b.node("a")
    b.learner()
    published = []
    for step in range(1, 5):
        b.deliver_group(step - 1)
        b.tell(StepDone(step=step, metrics={}))
        published += b.of(PublishVersion)
        for publication in b.of(PublishVersion):
            b.tell(VersionPublished(policy_version=publication.policy_version))
            b.tell(NodeReported(node_id="a", capacity=100, policy_version=publication.policy_version))
    assert [publication.policy_version for publication in published] == [3, 4]


def stale_bench(bench: BenchOf) -> Any:
    """Return a run with staleness bound 1 and one group a step. Of group 0, one rollout of version 0 has arrived and
    one is leased; group 1 is trained.
    """
    b = bench(max_staleness=1, groups_per_step=1, steps=9)
    b.node("a")
    b.learner()
    b.tell(b.arrival(b.leases[1], 0), RolloutScored(rollout_id="1-0", reward=1.0))
    return b


def test_an_open_group_continues_without_its_stale_rollouts(bench: BenchOf) -> None:
    b = stale_bench(bench)
    b.deliver_group(1)
    b.train(1)
    b.tell(NodeReported(node_id="a", capacity=100, policy_version=1))
    (lease,) = b.of(SendLease)
    b.deliver(lease)  # Step 2 is now planned; step 3 accepts nothing older than version 1.
    dropped = {(one.rollout_ids, one.reason) for one in b.of(RolloutsDropped)}
    assert dropped == {(("1-1",), DropReason.REVOKED), (("1-0",), DropReason.STALE)}
    assert b.of(RevokeLease) == [RevokeLease(node_id="a", lease_id=1, reason=DropReason.REVOKED)]
    assert b.of(GroupDropped) == []
    again = next(lease for lease in b.of(SendLease) if lease.group_id == 0)
    assert (again.indices, again.policy_version) == ((0, 1), 1)
    b.train(2)
    b.deliver(again)
    assert [planned.group_ids for planned in b.of(StepPlanned)] == [(0,)], "the oldest waiting group comes first"


def test_a_group_that_is_always_too_late_is_dropped_in_the_end(bench: BenchOf) -> None:
    """Whenever a rollout of group 0 arrives, the learner has taken another group, so that the rollout becomes stale
    (bound 1). After `MAX_REDRAWS` repetitions, the group must be dropped.
    """
    b = bench(max_staleness=1, groups_per_step=1, steps=99)
    b.node("a")
    b.learner()
    times_stale, begun = 0, 0
    for step in range(1, 99):
        own = max(lease.lease_id for lease in b.leases.values() if lease.group_id == 0)
        if own != begun:
            b.tell(b.arrival(b.leases[own], 0), RolloutScored(rollout_id=rollout_id(own, 0), reward=1.0))
            begun = own
        b.deliver_group(step)
        times_stale += any(one.reason is DropReason.STALE for one in b.of(RolloutsDropped))
        if b.of(GroupDropped):
            break
        b.train(step)
        b.tell(NodeReported(node_id="a", capacity=100, policy_version=step))
    assert b.of(GroupDropped) == [GroupDropped(group_id=0, reason=DropReason.STALE)]
    assert times_stale == MAX_REDRAWS + 1


def test_an_episode_that_began_too_long_ago_begins_again(bench: BenchOf) -> None:
    """Staleness bound 1: an episode's first turn is from version 0, and its second turn is leased. When version 0 is
    too old, the whole episode starts again.
    """
    b = bench(multi_turn=True, max_staleness=1, groups_per_step=1, steps=9)
    b.node("a")
    b.learner()
    b.go_on(b.leases[1])
    second = next(lease for lease in b.of(SendLease) if lease.turn)
    assert (second.group_id, second.indices, second.policy_version) == (0, (0,), 0)
    for step in (1, 2):
        b.deliver_group(step)
        if step == 1:
            b.train(step)
            b.tell(NodeReported(node_id="a", capacity=100, policy_version=step))
    dropped = {one.rollout_ids: one.reason for one in b.of(RolloutsDropped)}
    assert dropped[("1-0",)] is DropReason.STALE and b.of(GroupDropped) == []
    assert second.lease_id in {revoked.lease_id for revoked in b.of(RevokeLease)}
    again = [lease for lease in b.leases.values() if lease.group_id == 0 and lease.policy_version == 1]
    assert [(lease.indices, lease.turn) for lease in again] == [((0, 1), 0)]


def test_leases_that_became_too_stale_are_revoked_and_leased_again(bench: BenchOf) -> None:
    b = bench(max_staleness=1, groups_per_step=1, steps=9)
    b.node("a")
    b.learner()
    b.deliver_group(1)
    b.train(1)
    b.tell(NodeReported(node_id="a", capacity=100, policy_version=1))
    (lease,) = b.of(SendLease)
    b.deliver(lease)
    (dropped,) = b.of(RolloutsDropped)
    assert (dropped.rollout_ids, dropped.reason) == (("1-0", "1-1"), DropReason.REVOKED)
    assert b.of(RevokeLease) == [RevokeLease(node_id="a", lease_id=1, reason=DropReason.REVOKED)]
    assert b.of(GroupDropped) == []
    again = next(lease for lease in b.of(SendLease) if lease.group_id == 0)
    assert (again.indices, again.policy_version) == ((0, 1), 1)


def test_the_bound_holds_at_consumption_even_when_it_was_lowered(bench: BenchOf) -> None:
    """Groups were sampled under a bound of 4. After a restart with a bound of 1, the hub must train only fresh
    groups.
    """
    rows = tuple(
        UnfinishedRollout(
            rollout_id=f"{group + 1}-{index}",
            lease_id=group + 1,
            node_id="a",
            group_id=group,
            index=index,
            policy_version=version,
            deadline=0.0,
            state=ReceiptState.SCORED,
            reward=1.0,
        )
        for group, version in ((10, 1), (11, 4))
        for index in range(2)
    )
    snapshot = CoordinatorSnapshot(
        next_group_id=12,
        next_lease_id=50,
        groups=(GroupRow(group_id=10, seed=1), GroupRow(group_id=11, seed=2)),
        rollouts=rows,
        trained_steps=5,
        published_version=5,
    )
    b = bench(snapshot, max_staleness=1, groups_per_step=1, steps=9)
    b.learner(5)
    assert b.of(GroupDropped) == [GroupDropped(group_id=10, reason=DropReason.STALE)]
    (planned,) = b.of(StepPlanned)
    assert (planned.group_ids, planned.staleness) == ((11,), (1,))


def planned_snapshot(**changes: Any) -> CoordinatorSnapshot:
    """Return a run in which steps 1 and 2 are trained, and step 3 has a recorded batch."""
    values: dict[str, Any] = {
        "next_group_id": 3,
        "next_lease_id": 4,
        "groups": (GroupRow(group_id=2, seed=1),),
        "rollouts": tuple(
            UnfinishedRollout(
                rollout_id=f"3-{index}",
                lease_id=3,
                node_id="a",
                group_id=2,
                index=index,
                policy_version=2,
                deadline=0.0,
                state=ReceiptState.SCORED,
                reward=1.0,
            )
            for index in range(2)
        ),
        "trained_steps": 2,
        "planned": (StepRow(step=3, group_ids=(2,), rollout_ids=("3-0", "3-1")),),
        "published_version": 2,
        "replayable": frozenset({1, 2}),
    }
    return CoordinatorSnapshot(**{**values, **changes})


def test_a_learner_without_the_planned_step_gets_the_same_batch_again(bench: BenchOf) -> None:
    b = bench(planned_snapshot(), groups_per_step=1)
    b.learner(2)
    assert b.of(TrainStep) == [TrainStep(step=3)] and b.of(StepPlanned) == []
    b.tell(LearnerLost())
    b.learner(2)
    assert b.of(TrainStep) == [TrainStep(step=3)] and b.of(StepPlanned) == b.of(BeginStep) == []


def test_a_learner_with_the_planned_version_has_trained_the_step(bench: BenchOf) -> None:
    b = bench(planned_snapshot(), groups_per_step=1)
    b.learner(3)
    (trained,) = b.of(StepTrained)
    assert (trained.step, trained.rollout_ids) == (3, ("3-0", "3-1"))
    assert [told.node_ids for told in b.of(SendTrained)] == [("a",) * 2]
    assert b.of(PublishVersion) == [PublishVersion(policy_version=3)]
    assert b.of(TrainStep) == []


def test_a_learner_with_an_older_checkpoint_repeats_without_new_records(bench: BenchOf) -> None:
    b = bench(planned_snapshot(), groups_per_step=1)
    b.learner(0)
    assert b.effects == [TrainStep(step=1), TrainStep(step=2)]
    b.tell(StepDone(step=1, metrics={}))
    assert b.effects == [TrainStep(step=3)]
    b.tell(StepDone(step=2, metrics={}))
    assert b.of(StepTrained) == []
    b.tell(StepDone(step=3, metrics={}))
    assert [record.step for record in b.of(StepTrained)] == [3]


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        (4, {}),
        (3, {"planned": ()}),
        (0, {"replayable": frozenset({2})}),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_store_is_an_error(
    bench: BenchOf, version: int, changes: dict[str, Any]
) -> None:
    b = bench(planned_snapshot(**changes), groups_per_step=1)
    with pytest.raises(LocalProtocolError, match="do not fit together"):
        b.tell(LearnerReady(policy_version=version))


def test_a_step_known_only_to_the_checkpoint_keeps_its_metrics(bench: BenchOf) -> None:
    b = bench(planned_snapshot(), groups_per_step=1)
    b.tell(LearnerReady(policy_version=3, metrics={2: {"loss": 0.5}, 3: {"loss": 0.25}}))
    assert [(record.step, record.metrics) for record in b.of(StepTrained)] == [(3, {"loss": 0.25})]


def test_a_recorded_step_keeps_its_metrics(bench: BenchOf) -> None:
    b = bench(planned_snapshot(), groups_per_step=1)
    b.tell(LearnerReady(policy_version=2, metrics={1: {"loss": 0.5}, 2: {"loss": 0.25}}))
    assert b.of(StepTrained) == []


def two_planned() -> CoordinatorSnapshot:
    """Return a run in which steps 1 and 2 are trained, and steps 3 and 4 have recorded batches."""
    one = planned_snapshot()
    rollouts = tuple(replace(row, rollout_id=f"4-{row.index}", lease_id=4, group_id=3) for row in one.rollouts)
    return replace(
        one,
        next_group_id=4,
        next_lease_id=5,
        groups=(*one.groups, GroupRow(group_id=3, seed=2)),
        rollouts=(*one.rollouts, *rollouts),
        planned=(*one.planned, StepRow(step=4, group_ids=(3,), rollout_ids=("4-0", "4-1"))),
    )


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_learner_returns_before_between_or_after_two_planned_steps(bench: BenchOf, version: int) -> None:
    """Restarted learners report trained steps with their metrics; missing steps are trained again on the same
    batches.
    """
    b = bench(two_planned(), groups_per_step=1, max_staleness=2)
    assert b.coordinator.status().groups_planned == 2
    figures = {step: {"loss": step / 8} for step in (version - 1, version)}
    b.tell(LearnerReady(policy_version=version, metrics=figures))
    counted = [(record.step, record.metrics) for record in b.of(StepTrained)]
    assert counted == [(step, figures[step]) for step in range(3, version + 1)]
    assert b.of(TrainStep) == [TrainStep(step=step) for step in range(version + 1, min(version + 2, 4) + 1)]
    assert b.of(StepPlanned) == []
    for step in range(version + 1, 5):
        b.tell(StepDone(step=step, metrics={"loss": 1.0}))
        assert [record.step for record in b.of(StepTrained)] == ([step] if step > 2 else [])
    assert b.coordinator.status().trained_steps == 4


def test_a_learner_lost_between_two_steps_gets_both_again(bench: BenchOf) -> None:
    b = bench(two_planned(), groups_per_step=1, max_staleness=2)
    b.learner(2)
    b.tell(StepDone(step=3, metrics={}), LearnerLost())
    assert b.coordinator.status().training_step is None
    b.learner(2)
    assert b.of(TrainStep) == [TrainStep(step=3), TrainStep(step=4)] and b.of(StepTrained) == []


def test_a_computed_step_frees_the_learner_and_counts_once_it_is_written(bench: BenchOf) -> None:
    """Computed steps free the learner for the next one. Steps count as trained once their files are written; the
    recorded time is that of the computation.
    """
    b = bench(two_planned(), groups_per_step=1, max_staleness=2)
    b.learner(2)
    computed_at = b.now
    b.tell(StepComputed(step=3))
    assert b.effects == [] and b.coordinator.status().training_step == 4
    b.now += 7.0
    b.tell(StepComputed(step=4))
    assert b.effects == [] and b.coordinator.status().training_step is None
    b.tell(StepDone(step=3, metrics={}))
    (trained,) = b.of(StepTrained)
    assert (trained.step, trained.trained_at) == (3, computed_at)
    assert b.of(PublishVersion) == [PublishVersion(policy_version=3)]


def test_a_free_learner_takes_a_batch_before_its_last_step_is_written(bench: BenchOf) -> None:
    b = bench(groups_per_step=1, max_staleness=2)
    b.node("a", capacity=99)
    b.learner()
    b.deliver_group(0)
    assert b.of(TrainStep) == [TrainStep(step=1)]
    b.deliver_group(2)
    assert b.of(TrainStep) == [], "group 1 is older, and the learner has work"
    b.tell(StepComputed(step=1))
    assert b.of(TrainStep) == [TrainStep(step=2)]
    assert [planned.group_ids for planned in b.of(StepPlanned)] == [(2,)]


def test_a_computed_step_that_was_lost_is_given_again(bench: BenchOf) -> None:
    b = bench(two_planned(), groups_per_step=1, max_staleness=2)
    b.learner(2)
    b.tell(StepComputed(step=3), LearnerLost())
    assert b.coordinator.status().trained_steps == 2
    b.learner(2)
    assert b.of(TrainStep) == [TrainStep(step=3), TrainStep(step=4)] and b.of(StepTrained) == []


def test_a_step_that_was_not_given_is_an_error(bench: BenchOf) -> None:
    b = bench()
    b.learner()
    with pytest.raises(LocalProtocolError, match="not given"):
        b.tell(StepDone(step=1, metrics={}))
    b = bench(two_planned(), groups_per_step=1, max_staleness=2)
    b.learner(2)
    with pytest.raises(LocalProtocolError, match="step 4, not 3"):
        b.tell(StepDone(step=4, metrics={}))
    b.tell(StepComputed(step=3), StepComputed(step=4))
    with pytest.raises(LocalProtocolError, match="step 4 after version 2"):
        b.tell(StepDone(step=4, metrics={}))


def test_a_version_that_was_due_and_is_not_out_is_published_again(bench: BenchOf) -> None:
    b = bench(planned_snapshot(published_version=1), groups_per_step=1, max_staleness=2)
    b.learner(2)
    assert b.of(PublishVersion) == [PublishVersion(policy_version=2)]
    b.tell(LearnerLost())
    b.learner(2)
    assert b.of(PublishVersion) == [], "that version is still being published"


def test_a_publication_lost_in_a_crash_is_repeated(bench: BenchOf) -> None:
    """Version 2 was due when the hub died, and the learner already holds version 3. Without version 2 nothing more
    could be leased.
    """
    snapshot = CoordinatorSnapshot(next_group_id=3, next_lease_id=4, trained_steps=3, published_version=0)
    b = bench(snapshot, groups_per_step=1, steps=9, max_staleness=1, publish_every=2)
    b.node("a")
    assert b.of(PrepareGroup) == []
    b.learner(3)
    assert b.of(PublishVersion) == [PublishVersion(policy_version=2)]
    b.tell(VersionPublished(policy_version=2))
    assert b.of(PrepareGroup) == [PrepareGroup(group_id=3)]


def test_an_older_version_that_comes_late_is_recorded_but_not_announced(bench: BenchOf) -> None:
    b = bench(planned_snapshot(published_version=0), groups_per_step=1, max_staleness=2)
    b.tell(VersionPublished(policy_version=2), VersionPublished(policy_version=1))
    assert [record.policy_version for record in b.of(VersionRecorded)] == [2, 1]
    assert b.of(AnnounceVersion) == [AnnounceVersion(policy_version=2)]


def test_the_run_ends_tidily(bench: BenchOf) -> None:
    b = bench(max_staleness=3, groups_per_step=1, steps=2)
    b.node("a")
    assert [lease.group_id for lease in b.leases.values()] == [0, 1], "no group that no step will need"
    b.learner()
    b.deliver_group(0)
    b.train(1)
    b.deliver_group(1)
    b.tell(StepDone(step=2, metrics={}))
    assert b.of(FinishRun) == []
    b.tell(VersionPublished(policy_version=2))
    assert b.of(FinishRun) == [FinishRun()]
    status = b.coordinator.status()
    assert status.finished and status.in_flight == 0
    b.tell(Tick(), NodeReported(node_id="a", capacity=100, policy_version=2))
    assert b.effects == []


def test_a_finished_run_says_so_again_after_a_restart(bench: BenchOf) -> None:
    b = bench(CoordinatorSnapshot(next_group_id=4, next_lease_id=9, trained_steps=2, published_version=2), steps=2)
    assert b.effects == [FinishRun()]


def test_a_run_with_a_lowered_number_of_steps_drops_the_rest(bench: BenchOf) -> None:
    row = UnfinishedRollout(
        rollout_id="3-0",
        lease_id=3,
        node_id="a",
        group_id=2,
        index=0,
        policy_version=2,
        deadline=0.0,
        state=ReceiptState.LEASED,
        reward=None,
    )
    b = bench(planned_snapshot(planned=(), rollouts=(row,)), groups_per_step=1, steps=2)
    (dropped,) = b.of(RolloutsDropped)
    assert (dropped.rollout_ids, dropped.reason) == (("3-0",), DropReason.RUN_ENDED)
    assert b.of(RevokeLease) == [RevokeLease(node_id="a", lease_id=3, reason=DropReason.RUN_ENDED)]
    assert b.of(FinishRun) == [FinishRun()]


def test_dynamic_sampling_replaces_groups_without_an_advantage(bench: BenchOf) -> None:
    b = bench(mode="sequential", dynamic_sampling=True)
    b.node("a")
    b.learner()
    b.rewarded(0, 1.0, 1.0)
    assert b.of(GroupDropped) == [GroupDropped(group_id=0, reason=DropReason.NO_ADVANTAGE)]
    assert [opened.group_id for opened in b.of(GroupOpened)] == [2]
    b.rewarded(1, 0.0, 1.0)
    assert b.of(StepPlanned) == []
    b.rewarded(2, 1.0, 0.0)
    (planned,) = b.of(StepPlanned)
    assert planned.group_ids == (1, 2)


def test_when_nothing_has_an_advantage_the_groups_are_trained_as_they_are(bench: BenchOf) -> None:
    b = bench(mode="sequential", dynamic_sampling=True, groups_per_step=1, steps=2)
    b.node("a")
    b.learner()
    for group_id in range(MAX_FLAT_BATCHES):
        b.rewarded(group_id, 1.0, 1.0)
        assert [dropped.group_id for dropped in b.of(GroupDropped)] == [group_id]
    b.rewarded(MAX_FLAT_BATCHES, 1.0, 1.0)
    (planned,) = b.of(StepPlanned)
    assert planned.group_ids == (MAX_FLAT_BATCHES,)
    b.train(1)
    b.rewarded(MAX_FLAT_BATCHES + 1, 0.0, 0.0)
    assert len(b.of(GroupDropped)) == 1, "each step has its own limit of flat batches"


def test_patience_with_flat_groups_survives_a_restart(bench: BenchOf) -> None:
    flat = tuple(range(MAX_FLAT_BATCHES))
    snapshot = CoordinatorSnapshot(next_group_id=len(flat), flat_groups=flat)
    b = bench(snapshot, mode="sequential", dynamic_sampling=True, groups_per_step=1, steps=2)
    b.node("a")
    b.learner()
    b.rewarded(len(flat), 1.0, 1.0)
    assert [planned.group_ids for planned in b.of(StepPlanned)] == [(len(flat),)]


def test_without_dynamic_sampling_flat_groups_are_trained(bench: BenchOf) -> None:
    b = bench(mode="sequential")
    b.node("a")
    b.learner()
    b.rewarded(0, 1.0, 1.0)
    b.rewarded(1, 1.0, 1.0)
    assert [planned.group_ids for planned in b.of(StepPlanned)] == [(0, 1)]


def test_a_token_budget_ends_a_batch(bench: BenchOf) -> None:
    """Groups have four tokens each, so two of them reach the budget of seven."""
    b = bench(tokens_per_step=7, groups_per_step=5, max_staleness=1, steps=9)
    b.node("a")
    b.learner()
    b.deliver_group(3)
    assert b.of(StepPlanned) == []
    b.deliver_group(1)
    (planned,) = b.of(StepPlanned)
    assert planned.group_ids == (1, 3)


def test_one_group_may_exceed_the_budget_and_a_full_batch_may_miss_it(bench: BenchOf) -> None:
    b = bench(tokens_per_step=1, groups_per_step=5)
    b.node("a")
    b.learner()
    b.deliver_group(0)
    assert [planned.group_ids for planned in b.of(StepPlanned)] == [(0,)]
    b = bench(tokens_per_step=100, groups_per_step=2)
    b.node("a")
    b.learner()
    b.deliver_group(0)
    b.deliver_group(1)
    assert [planned.group_ids for planned in b.of(StepPlanned)] == [(0, 1)]


def test_admission_follows_what_steps_consume(bench: BenchOf) -> None:
    b = bench(tokens_per_step=7, groups_per_step=8, mode="sequential", steps=9)
    b.node("a")
    b.learner()
    # With a token budget, the number of groups in a step is unknown: all that might belong to it are sampled, mostly in
    # vain.
    for group_id in range(8):
        b.deliver_group(group_id)
    assert [planned.group_ids for planned in b.of(StepPlanned)] == [(0, 1)]
    assert [dropped.group_id for dropped in b.of(GroupDropped)] == [2, 3, 4, 5, 6, 7]
    b.train(1)
    assert [opened.group_id for opened in b.of(GroupOpened)] == [8, 9]


def test_more_groups_are_opened_when_the_usual_number_has_too_few_tokens(bench: BenchOf) -> None:
    snapshot = CoordinatorSnapshot(batch_sizes=(1, 1, 2), trained_steps=3, published_version=3)
    b = bench(snapshot, tokens_per_step=14, groups_per_step=8, mode="sequential", steps=9)
    b.node("a")
    b.learner(3)
    assert len(b.leases) == 2
    b.deliver_group(0)
    assert b.of(GroupOpened) == []
    b.deliver_group(1)  # 8 of 14 tokens have arrived: two more groups may be needed.
    assert [opened.group_id for opened in b.of(GroupOpened)] == [2, 3]
    b.deliver_group(2)
    b.deliver_group(3)
    assert [planned.group_ids for planned in b.of(StepPlanned)] == [(0, 1, 2, 3)]


def test_a_step_that_takes_more_groups_than_usual_has_those_leased_that_are_open(bench: BenchOf) -> None:
    b = bench(tokens_per_step=3, groups_per_step=3, max_staleness=0, steps=3)
    b.node("a", capacity=2)
    b.learner()
    b.deliver_group(0)
    b.train(1)
    b.tell(NodeReported(node_id="a", capacity=2, policy_version=1))
    leased = [(lease, index) for lease in b.leases.values() if lease.group_id == 1 for index in lease.indices]
    few = replace(PAYLOAD, completion_ids=PAYLOAD.completion_ids[:1], behavior_logprobs=PAYLOAD.behavior_logprobs[:1])
    b.tell(*(b.arrival(lease, index, payload=few) for lease, index in leased))
    assert not any(lease.group_id == 2 for lease in b.leases.values()), "one group was enough for step 1"
    b.tell(*(RolloutScored(rollout_id=rollout_id(lease.lease_id, index), reward=1.0) for lease, index in leased))
    assert any(lease.group_id == 2 for lease in b.leases.values()), "two of three tokens are there"


def batches_by_order(bench: BenchOf, chance: Random | None, **settings: Any) -> list[tuple[int, ...]]:
    """Return a sequential run's batches if groups complete in random order; without `chance`, in order of their ids."""
    b = bench(mode="sequential", dynamic_sampling=True, steps=4, groups_per_step=4, **settings)
    b.node("a", capacity=1000)
    b.learner()
    batches: list[tuple[int, ...]] = []
    while len(batches) < 4:
        still_open = sorted({lease.group_id for lease in b.leases.values()})
        group_id = chance.choice(still_open) if chance else still_open[0]
        b.rewarded(group_id, 0.0, float(group_id % 3 > 0))
        planned = b.of(StepPlanned)
        gone = {group_id} | {dropped.group_id for dropped in b.of(GroupDropped)}
        b.leases = {key: lease for key, lease in b.leases.items() if lease.group_id not in gone}
        if planned:
            batches += [step.group_ids for step in planned]
            b.train(planned[-1].step)
    return batches


@pytest.mark.parametrize("tokens_per_step", [0, 8, 15])
def test_no_order_of_arrival_changes_a_batch_of_a_sequential_run(bench: BenchOf, tokens_per_step: int) -> None:
    """Groups have four tokens each. Every third group has equal rewards, so another one takes its place in the
    batch.
    """
    expected = batches_by_order(bench, None, tokens_per_step=tokens_per_step)
    for seed in range(20):
        assert batches_by_order(bench, Random(seed), tokens_per_step=tokens_per_step) == expected


@pytest.mark.parametrize("restarted", [False, True])
def test_flat_groups_older_than_a_planned_one_cost_no_patience(bench: BenchOf, restarted: bool) -> None:
    """Only flat groups (equal rewards) that are newer than the last planned group count towards the limit of dropped
    flat groups, `MAX_FLAT_BATCHES`. The same holds after a restart.
    """
    settings = {"dynamic_sampling": True, "groups_per_step": 1, "max_staleness": 2, "steps": 9}
    b = bench(**settings)
    b.node("a")
    b.learner()
    b.rewarded(2, 0.0, 1.0)
    assert [planned.group_ids for planned in b.of(StepPlanned)] == [(2,)]
    b.rewarded(0, 1.0, 1.0)
    assert [dropped.group_id for dropped in b.of(GroupDropped)] == [0]
    if restarted:
        snapshot = CoordinatorSnapshot(
            next_group_id=3, next_lease_id=4, newest_planned_group=2, trained_steps=1, published_version=1
        )
        b = bench(snapshot, **settings)
        b.node("a", version=1)
        b.learner(1)
    else:
        b.train(1)
        b.tell(NodeReported(node_id="a", capacity=100, policy_version=1))
    flat: list[int] = []
    while not b.of(StepPlanned):
        lease = next(lease for lease in b.leases.values() if lease.group_id > 2 and lease.group_id not in flat)
        b.rewarded(lease.group_id, 1.0, 1.0)
        flat += [dropped.group_id for dropped in b.of(GroupDropped)]
    assert len(flat) == MAX_FLAT_BATCHES
