from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echo_hub.core.accounting.effects import (
    EvaluationDone,
    FinishRun,
    GroupDropped,
    GroupOpened,
    RevokeLease,
    RolloutsDropped,
    RolloutsEvaluated,
    ScoreRecorded,
    ScoreRollout,
    SendLease,
)
from echo_hub.core.accounting.events import (
    EvaluationAbandoned,
    EvaluationWanted,
    LeaseGivenBack,
    RolloutRejected,
    Tick,
)
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot, UnfinishedRollout
from echo_hub.core.evaluating import evaluation_seed
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.policy.leasing import EVALUATION_SHARE
from echo_shared.sampling.draws import derive_seed
from echo_shared.wire.messages import DropReason, ReceiptState

BY_NODES = {"evaluation_problems": 2, "evaluation_samples": 3, "run_seed": 5}


def group_id(version: int, number: int, *, greedy: bool = True) -> int:
    return EvaluationGroup(policy_version=version, greedy=greedy, number=number).group_id


def is_evaluation(lease: SendLease) -> bool:
    return EvaluationGroup.of(lease.group_id) is not None


def row(group: int, index: int, lease_id: int, state: ReceiptState = ReceiptState.LEASED) -> UnfinishedRollout:
    return UnfinishedRollout(
        rollout_id=f"{lease_id}-{index}",
        lease_id=lease_id,
        node_id="a",
        group_id=group,
        index=index,
        policy_version=0,
        deadline=2_000.0,
        state=state,
        reward=None,
    )


def test_every_problem_is_leased_by_the_pinned_version_and_ends_evaluated(bench: Callable[..., Any]) -> None:
    b = bench(**BY_NODES)
    b.node("a", capacity=100, version=7)
    b.tell(EvaluationWanted(policy_version=4))
    leases = [lease for lease in b.of(SendLease) if is_evaluation(lease)]
    assert [(lease.group_id, lease.indices) for lease in leases] == [
        (group_id(4, 0), (0,)),
        (group_id(4, 1), (0,)),
        (group_id(4, 0, greedy=False), (0, 1, 2)),
        (group_id(4, 1, greedy=False), (0, 1, 2)),
    ]
    assert {lease.policy_version for lease in leases} == {4}
    assert [lease.seed for lease in leases] == [evaluation_seed(5, number) for number in (0, 1, 0, 1)]
    assert not b.of(GroupOpened)
    for lease in leases[:-1]:
        b.deliver(lease)
        assert [record.rollout_ids for record in b.of(RolloutsEvaluated)] == [
            (f"{lease.lease_id}-{index}",) for index in lease.indices
        ]
        assert {receipt.state for receipt in b.receipts("a")} >= {ReceiptState.EVALUATED}
        assert not b.of(EvaluationDone)
    b.deliver(leases[-1])
    assert b.of(EvaluationDone) == [EvaluationDone(policy_version=4)]
    status = b.coordinator.status()
    assert (status.groups_open, status.groups_buffered) == (2, 0)


def test_training_and_evaluations_share_what_nodes_take(bench: Callable[..., Any]) -> None:
    """Neither kind of work may starve the other: over a long time, one rollout in `EVALUATION_SHARE` is for an
    evaluation.
    """
    b = bench(**{**BY_NODES, "evaluation_problems": 64}, groups_per_step=64, max_staleness=8, steps=9)
    b.learner()
    b.node("a", capacity=2, version=0)
    b.tell(EvaluationWanted(policy_version=0))
    counts, delivered = {True: 0, False: 0}, set[int]()
    for _ in range(100):
        for lease in [lease for lease_id, lease in b.leases.items() if lease_id not in delivered]:
            counts[is_evaluation(lease)] += len(lease.indices)
            delivered.add(lease.lease_id)
            b.deliver(lease)
    assert sum(counts.values()) > 150
    assert abs(counts[True] / sum(counts.values()) - 1 / EVALUATION_SHARE) < 0.05, counts


def test_evaluations_get_the_capacity_that_training_leaves(bench: Callable[..., Any]) -> None:
    b = bench(**{**BY_NODES, "evaluation_problems": 64}, groups_per_step=1, max_staleness=0)
    b.learner()
    b.node("a", capacity=100, version=0)
    b.tell(EvaluationWanted(policy_version=0))
    assert b.coordinator.status().leased_by_node["a"] > 90


def test_a_late_lease_is_given_to_another_and_the_first_result_wins(bench: Callable[..., Any]) -> None:
    b = bench(evaluation_problems=1)
    b.node("a", version=0)
    b.tell(EvaluationWanted(policy_version=0))
    (first,) = [lease for lease in b.of(SendLease) if is_evaluation(lease)]
    b.node("b", version=0)
    b.now += 61.0
    b.tell(Tick())
    (second,) = [lease for lease in b.of(SendLease) if is_evaluation(lease)]
    assert second.node_id == "b" and second.seed == first.seed
    b.deliver(first)
    assert b.of(EvaluationDone)
    assert [record.reason for record in b.of(RolloutsDropped)] == [DropReason.EXPIRED]
    assert [(revoked.node_id, revoked.lease_id) for revoked in b.of(RevokeLease)] == [("b", second.lease_id)]


def test_a_node_that_cannot_get_the_version_returns_the_lease(bench: Callable[..., Any]) -> None:
    b = bench(evaluation_problems=1)
    b.node("a", version=0)
    b.tell(EvaluationWanted(policy_version=0))
    (lease,) = [lease for lease in b.of(SendLease) if is_evaluation(lease)]
    b.node("b", version=0)
    b.tell(LeaseGivenBack(node_id="a", lease_id=lease.lease_id, indices=(0,), reason="cannot get it"))
    (again,) = [lease for lease in b.of(SendLease) if is_evaluation(lease)]
    assert (again.node_id, again.group_id) == ("b", lease.group_id)


def test_a_scorer_failure_gives_no_reward_and_no_second_attempt(bench: Callable[..., Any]) -> None:
    b = bench(evaluation_problems=1)
    b.node("a", version=0)
    b.tell(EvaluationWanted(policy_version=0))
    (lease,) = [lease for lease in b.of(SendLease) if is_evaluation(lease)]
    b.deliver(lease, score=False)
    (scored,) = b.of(ScoreRollout)
    b.tell(RolloutRejected(rollout_id=scored.rollout_id, reason=DropReason.SCORER_FAILED, detail="no"))
    assert [record.reward for record in b.of(ScoreRecorded)] == [None]
    assert b.of(RolloutsEvaluated) and b.of(EvaluationDone)


def test_invalid_evaluation_rollouts_are_leased_again(bench: Callable[..., Any]) -> None:
    b = bench(evaluation_problems=1)
    b.node("a", version=0)
    b.tell(EvaluationWanted(policy_version=0))
    (lease,) = [lease for lease in b.of(SendLease) if is_evaluation(lease)]
    b.node("b", version=0)
    b.deliver(lease, score=False)
    (scored,) = b.of(ScoreRollout)
    b.tell(RolloutRejected(rollout_id=scored.rollout_id, reason=DropReason.INVALID, detail="no"))
    assert [again.node_id for again in b.of(SendLease) if is_evaluation(again)] == ["b"]


def test_an_episode_of_several_turns_is_final_as_a_whole(bench: Callable[..., Any]) -> None:
    b = bench(evaluation_problems=1, multi_turn=True)
    b.node("a", version=0)
    b.tell(EvaluationWanted(policy_version=0))
    (first,) = [lease for lease in b.of(SendLease) if is_evaluation(lease)]
    b.go_on(first)
    (second,) = [lease for lease in b.of(SendLease) if is_evaluation(lease)]
    assert (second.turn, second.seed) == (1, derive_seed(evaluation_seed(0, 0), 1))
    b.deliver(second)
    (record,) = b.of(RolloutsEvaluated)
    assert record.rollout_ids == (f"{first.lease_id}-0", f"{second.lease_id}-0")


def test_after_a_restart_an_evaluation_resumes_once_it_is_wanted(bench: Callable[..., Any]) -> None:
    sampled = group_id(0, 1, greedy=False)
    snapshot = CoordinatorSnapshot(
        next_lease_id=9,
        rollouts=(row(sampled, 1, 8),),
        evaluated=frozenset({(group_id(0, 0), 0), (group_id(0, 1), 0), (sampled, 0)}),
    )
    b = bench(snapshot, **BY_NODES)
    b.node("b", version=0)
    assert not any(is_evaluation(lease) for lease in b.leases.values()), "its version may not be available yet"
    b.tell(EvaluationWanted(policy_version=0))
    leased = {(lease.group_id, lease.indices) for lease in b.of(SendLease) if is_evaluation(lease)}
    assert leased == {(group_id(0, 0, greedy=False), (0, 1, 2)), (sampled, (2,))}


def test_an_evaluation_finished_before_a_restart_is_done_at_once(bench: Callable[..., Any]) -> None:
    b = bench(CoordinatorSnapshot(evaluated=frozenset({(group_id(3, 0), 0)})), evaluation_problems=1)
    b.tell(EvaluationWanted(policy_version=3))
    assert b.of(EvaluationDone) == [EvaluationDone(policy_version=3)]


def test_evaluations_removed_from_the_settings_are_dropped_at_the_start(bench: Callable[..., Any]) -> None:
    rows = (row(group_id(0, 1), 0, 1), row(group_id(0, 0, greedy=False), 4, 2), row(group_id(0, 0), 0, 3))
    b = bench(CoordinatorSnapshot(next_lease_id=4, rollouts=rows), evaluation_problems=1, evaluation_samples=2)
    dropped = {name for record in b.of(RolloutsDropped) for name in record.rollout_ids}
    assert dropped == {"1-0", "2-4"} and not b.of(GroupDropped)
    assert b.coordinator.status().in_flight == 1


def test_the_runs_end_leaves_evaluations_at_work_and_abandoning_ends_them(bench: Callable[..., Any]) -> None:
    b = bench(steps=1, groups_per_step=1, evaluation_problems=1)
    b.learner()
    b.node("a", version=0)
    training = [lease.lease_id for lease in b.leases.values()]
    for lease_id in training:
        b.deliver(b.leases[lease_id])
    b.tell(EvaluationWanted(policy_version=0))
    b.train(1)
    assert b.of(FinishRun)
    b.tell(EvaluationWanted(policy_version=1))
    assert [lease.policy_version for lease in b.of(SendLease)] == [1], "nodes still work for the evaluation"
    (lease,) = b.of(SendLease)
    b.tell(EvaluationAbandoned(policy_version=0))
    assert [record.reason for record in b.of(RolloutsDropped)] == [DropReason.RUN_ENDED]
    b.deliver(lease)
    assert b.of(EvaluationDone) == [EvaluationDone(policy_version=1)]
    assert b.coordinator.status().in_flight == 0
