from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from echo_hub.core.accounting.effects import (
    AnswerOpened,
    AnswersCancelled,
    DeliverAnswer,
    GroupOpened,
    RevokeLease,
    RolloutReceived,
    RolloutsAnswered,
    RolloutsDropped,
    ScoreRecorded,
    ScoreRollout,
    SendLease,
)
from echo_hub.core.accounting.events import (
    AnswerCancelled,
    AnswerWanted,
    EvaluationWanted,
    LeaseGivenBack,
    NodeConnected,
    NodeReported,
    RolloutRejected,
    Tick,
)
from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot, UnfinishedRollout
from echo_hub.core.answer_groups import FIRST_ANSWER_ID, AnswerGroup, AnswerMember, is_answer
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.policy.leasing import EVALUATION_SHARE
from echo_hub.core.returns import MAX_RETURNS
from echo_hub.core.tenant_names import TenantNames
from echo_shared.wire.messages import DropReason, ReceiptState
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

SAMPLING = SamplingParameters(temperature=0.7, max_tokens=9, stop_ids=(2,))
NO_TRAINING = {"leasing": "draining"}
OURS = FIRST_TENANT_VERSION + 5


def asked(
    number: int, *counts: int, version: int = OURS, checked: bool = False, cancelled: tuple[str, ...] = ()
) -> AnswerGroup:
    """Return group `number` with requests "r0", "r1" and so on, of `counts` samples each."""
    starts = [sum(counts[:at]) for at in range(len(counts))]
    return AnswerGroup(
        group_id=FIRST_ANSWER_ID + number,
        tenant_id="t",
        prompt_ids=np.array([1, 2, 3], np.int32),
        policy_version=version,
        seed=70 + number,
        sampling=SAMPLING,
        is_checked=checked,
        members=tuple(
            AnswerMember(request_id=f"r{at}", num_samples=count, first_index=start, is_cancelled=f"r{at}" in cancelled)
            for at, (count, start) in enumerate(zip(counts, starts, strict=True))
        ),
    )


def leased(b: Any) -> list[SendLease]:
    return [lease for lease in b.of(SendLease) if is_answer(lease.group_id)]


def delivered(b: Any) -> list[tuple[int, int, bool]]:
    return [(one.group_id - FIRST_ANSWER_ID, one.index, one.payload is not None) for one in b.of(DeliverAnswer)]


def test_a_request_is_leased_with_its_version_and_ends_answered(bench: Callable[..., Any]) -> None:
    b = bench(**NO_TRAINING)
    b.node("a", version=3)
    b.tell(AnswerWanted(group=asked(0, 2, 1)))
    (lease,) = leased(b)
    assert (lease.indices, lease.policy_version, lease.seed, lease.may_move_on) == ((0, 1, 2), OURS, 70, False)
    assert lease.sampling == SAMPLING
    (opened,) = b.of(AnswerOpened)
    assert opened.group.members == asked(0, 2, 1).members and not b.of(GroupOpened)
    b.deliver(lease, reward=0.0)
    assert delivered(b) == [(0, 0, True), (0, 1, True), (0, 2, True)]
    assert [one.rollout_ids for one in b.of(RolloutsAnswered)] == [(f"{lease.lease_id}-{index}",) for index in range(3)]
    assert not b.of(ScoreRecorded)
    assert {receipt.state for receipt in b.receipts("a")} >= {ReceiptState.ANSWERED}
    status = b.coordinator.status()
    assert (status.in_flight, status.requests_open, status.groups_open) == (0, 0, 0)


def test_requests_do_not_count_when_training_groups_are_admitted(bench: Callable[..., Any]) -> None:
    b, alone = bench(max_staleness=1), bench(max_staleness=1)
    b.tell(*(AnswerWanted(group=asked(number, 4)) for number in range(8)))
    for one in (b, alone):
        one.learner()
        one.node("a", capacity=4, version=0)
    assert b.coordinator.status().groups_open == alone.coordinator.status().groups_open > 0


def test_training_and_requests_share_what_nodes_take(bench: Callable[..., Any]) -> None:
    """One rollout in `EVALUATION_SHARE` is a tenant's, while both kinds of work wait. With an evaluation as a third
    kind, the three shares are 1/2, 1/4 and 1/4.
    """
    for evaluations, training_share in ((0, 1 - 1 / EVALUATION_SHARE), (64, 1 / 2)):
        b = bench(groups_per_step=64, max_staleness=8, steps=9, evaluation_problems=evaluations)
        b.learner()
        b.node("a", capacity=2, version=0)
        b.tell(*(AnswerWanted(group=asked(number, 4)) for number in range(64)))
        if evaluations:
            b.tell(EvaluationWanted(policy_version=0))
        counts, told = {"training": 0, "answers": 0, "evaluations": 0}, set[int]()
        for _ in range(100):
            for lease in [lease for lease_id, lease in b.leases.items() if lease_id not in told]:
                is_evaluation = EvaluationGroup.of(lease.group_id) is not None
                kind = "answers" if is_answer(lease.group_id) else "evaluations" if is_evaluation else "training"
                counts[kind] += len(lease.indices)
                told.add(lease.lease_id)
                b.deliver(lease)
        total = sum(counts.values())
        assert total > 150 and abs(counts["training"] / total - training_share) < 0.06, counts
        assert counts["answers"] / total > 0.2, counts


def test_requests_get_all_capacity_without_training(bench: Callable[..., Any]) -> None:
    b = bench(**NO_TRAINING)
    b.node("a", capacity=100, version=0)
    b.tell(*(AnswerWanted(group=asked(number, 4)) for number in range(40)))
    assert b.coordinator.status().leased_by_node["a"] > 90


def test_a_version_goes_first_to_nodes_that_had_it(bench: Callable[..., Any]) -> None:
    b = bench(**NO_TRAINING)
    for node_id in "abc":
        b.node(node_id, capacity=8, version=0)
    b.tell(AnswerWanted(group=asked(0, 1)))
    (first,) = leased(b)
    b.deliver(first)
    for number in range(1, 7):
        b.tell(AnswerWanted(group=asked(number, 1)))
        (lease,) = leased(b)
        assert lease.node_id == first.node_id, "the other nodes would have to fetch the version"
    b.tell(AnswerWanted(group=asked(9, 8)))
    assert {lease.node_id for lease in leased(b)} > {first.node_id}, "a full node does not hold up a request"


def test_work_by_the_base_goes_to_all_nodes(bench: Callable[..., Any]) -> None:
    b = bench(**NO_TRAINING)
    for node_id in "abc":
        b.node(node_id, capacity=8, version=0)
    b.tell(AnswerWanted(group=asked(100, 1, version=0)))
    b.deliver(leased(b)[0])
    b.tell(*(AnswerWanted(group=asked(number, 1, version=0)) for number in range(6)))
    assert {lease.node_id for lease in leased(b)} == set("abc")


def test_failures_of_nodes_never_end_a_request(bench: Callable[..., Any]) -> None:
    b = bench(**NO_TRAINING)
    b.node("a", version=0)
    b.tell(AnswerWanted(group=asked(0, 1)))
    for _ in range(MAX_RETURNS + 2):
        (lease,) = leased(b)
        assert (lease.node_id, lease.indices, lease.seed) == ("a", (0,), 70)
        b.tell(LeaseGivenBack(node_id="a", lease_id=lease.lease_id, indices=(0,), reason="no room"))
        while not leased(b):  # The node rests after failures.
            b.now += 30.0
            b.tell(Tick())
    (lease,) = leased(b)
    b.deliver(lease, score=False)
    (scored,) = b.of(ScoreRollout)
    b.tell(RolloutRejected(rollout_id=scored.rollout_id, reason=DropReason.INVALID, detail="too long"))
    b.node("b", version=0)
    (again,) = leased(b)
    b.deliver(again)
    assert again.node_id == "b" and delivered(b) == [(0, 0, True)]


def test_the_first_of_two_results_is_delivered(bench: Callable[..., Any]) -> None:
    b = bench(**NO_TRAINING)
    b.node("a", version=0)
    b.tell(AnswerWanted(group=asked(0, 1)))
    (first,) = leased(b)
    b.node("b", version=0)
    b.now += 61.0
    b.tell(Tick())
    (second,) = leased(b)
    assert (second.node_id, second.seed) == ("b", first.seed)
    b.deliver(first)
    assert delivered(b) == [(0, 0, True)]
    assert [record.reason for record in b.of(RolloutsDropped)] == [DropReason.EXPIRED]
    assert [(one.node_id, one.lease_id) for one in b.of(RevokeLease)] == [("b", second.lease_id)]
    b.deliver(second)
    assert delivered(b) == []


def test_cancelling_ends_only_one_request_of_a_group(bench: Callable[..., Any]) -> None:
    b = bench(**NO_TRAINING)
    b.node("a", version=0)
    b.tell(AnswerWanted(group=asked(0, 2, 2)))
    (lease,) = leased(b)
    b.tell(AnswerCancelled(group_id=FIRST_ANSWER_ID, request_id="r1"))
    assert b.of(AnswersCancelled) == [AnswersCancelled(group_id=FIRST_ANSWER_ID, request_id="r1")]
    (dropped,) = b.of(RolloutsDropped)
    assert dropped.rollout_ids == (f"{lease.lease_id}-2", f"{lease.lease_id}-3") and not b.of(RevokeLease)
    assert dropped.reason is DropReason.REVOKED
    b.tell(*(b.arrival(lease, index) for index in (0, 2)))
    assert [one.rollout_id for one in b.of(ScoreRollout)] == [f"{lease.lease_id}-0"], "no cancelled one"
    b.tell(AnswerCancelled(group_id=FIRST_ANSWER_ID, request_id="r0"))
    assert [one.lease_id for one in b.of(RevokeLease)] == [lease.lease_id]
    status = b.coordinator.status()
    assert (status.in_flight, status.requests_open) == (0, 0)
    b.tell(AnswerCancelled(group_id=FIRST_ANSWER_ID, request_id="r0"))
    assert not b.effects, "cancelling twice does nothing"


def test_a_cancelled_group_leases_nothing_any_more(bench: Callable[..., Any]) -> None:
    b = bench(**NO_TRAINING)
    b.tell(AnswerWanted(group=asked(0, 2)), AnswerCancelled(group_id=FIRST_ANSWER_ID, request_id="r0"))
    b.node("a", version=0)
    assert not leased(b) and b.coordinator.status().requests_open == 0


def test_a_restart_goes_on_with_what_is_unfinished(bench: Callable[..., Any]) -> None:
    def row(lease_id: int, index: int, state: ReceiptState) -> UnfinishedRollout:
        return UnfinishedRollout(
            rollout_id=f"{lease_id}-{index}",
            lease_id=lease_id,
            node_id="a",
            group_id=FIRST_ANSWER_ID,
            index=index,
            policy_version=OURS,
            deadline=1_050.0,
            state=state,
            reward=None,
        )

    snapshot = CoordinatorSnapshot(
        next_lease_id=9,
        answers=(asked(0, 4, 1, cancelled=("r1",)), asked(1, 1)),
        answered=frozenset({(FIRST_ANSWER_ID, 0), (FIRST_ANSWER_ID + 1, 0)}),
        rollouts=(row(1, 1, ReceiptState.LEASED), row(1, 2, ReceiptState.RECEIVED)),
    )
    b = bench(snapshot, **NO_TRAINING)
    assert [one.rollout_id for one in b.of(ScoreRollout)] == ["1-2"], "its check is done again"
    assert b.coordinator.status().requests_open == 1, "the second group was answered before"
    b.node("a", version=0)
    sent = {(lease.lease_id, lease.indices) for lease in leased(b)}
    assert sent == {(1, (1,)), (9, (3,))}
    for lease in leased(b):
        b.deliver(lease)
    assert b.coordinator.status().in_flight == 1
    assert all(lease.seed == 70 for lease in b.leases.values())


def test_requests_outlive_the_run(bench: Callable[..., Any]) -> None:
    b = bench(steps=1)
    b.learner()
    b.node("a", version=0)
    b.tell(AnswerWanted(group=asked(0, 1)))
    (lease,) = leased(b)
    for training in [one for one in b.leases.values() if not is_answer(one.group_id)]:
        b.deliver(training)
    b.train(1)
    assert b.coordinator.status().finished
    b.deliver(lease)
    assert delivered(b) == [(0, 0, True)]
    b.tell(AnswerWanted(group=asked(1, 1)))
    assert len(leased(b)) == 1


def test_tenants_lengths_do_not_change_those_of_the_run(bench: Callable[..., Any]) -> None:
    b = bench(**NO_TRAINING)
    b.node("a", version=0)
    b.tell(AnswerWanted(group=asked(0, 1)))
    b.deliver(leased(b)[0])
    ledger = b.coordinator._ledger
    assert ledger.lengths.mean_tokens == 0 and b.coordinator._answering.lengths.mean_tokens == 2


def test_a_paused_hub_leases_no_requests(bench: Callable[..., Any]) -> None:
    b = bench(leasing="paused")
    b.node("a", version=0)
    b.tell(AnswerWanted(group=asked(0, 1)))
    assert not leased(b)


def test_a_completion_that_ends_early_stops_its_node(bench: Callable[..., Any]) -> None:
    """The node still draws both samples when the hub takes their streamed tokens as the result. It can stop only whole
    leases.
    """
    b = bench(**NO_TRAINING)
    b.node("a", version=3)
    b.tell(AnswerWanted(group=asked(0, 2)))
    (lease,) = leased(b)
    b.now += 4.0
    b.tell(replace(b.arrival(lease, 0), ends_early=True))
    assert not b.of(RevokeLease) and [record.payload.sampling_s for record in b.of(RolloutReceived)] == [4.0]
    b.tell(replace(b.arrival(lease, 1), ends_early=True))
    assert [(revoked.node_id, revoked.lease_id) for revoked in b.of(RevokeLease)] == [("a", lease.lease_id)]
    b.tell(b.arrival(lease, 1))
    assert not b.of(RolloutReceived), "the node's own result comes too late"


def test_a_node_that_refuses_the_tenant_gets_none_of_its_work(bench: Callable[..., Any]) -> None:
    b = bench(tenant_names=TenantNames(shown=True), **NO_TRAINING)
    for node_id, wish in (("a", {"answers": False}), ("b", {"refuses": frozenset({"t"})})):
        b.tell(
            NodeConnected(node_id=node_id, **wish),
            NodeReported(node_id=node_id, capacity=100, policy_version=0),
        )
    b.tell(AnswerWanted(group=asked(0, 2)))
    assert not leased(b)
    b.node("c")
    (lease,) = leased(b)
    assert (lease.node_id, lease.tenant) == ("c", "t")
    b.tell(NodeConnected(node_id="a"), NodeReported(node_id="a", capacity=100, policy_version=0))
    b.tell(AnswerWanted(group=asked(1, 200)))
    assert {one.node_id for one in leased(b)} == {"a", "c"}, "a node's newest word counts"


def test_nodes_see_a_pseudonym_unless_the_operator_shows_names(bench: Callable[..., Any]) -> None:
    names = TenantNames(secret=b"s")
    b = bench(tenant_names=names, **NO_TRAINING)
    b.node("a")
    b.tell(AnswerWanted(group=asked(0, 1)))
    (lease,) = leased(b)
    assert lease.tenant == names.of("t") != "t"


def ever_leased(b: Any) -> list[SendLease]:
    return list(b.leases.values())


def cannot_use(b: Any, lease: SendLease, *, version: int = OURS) -> None:
    """Let the lease's node return it, because its engine cannot use this version."""
    b.tell(
        LeaseGivenBack(
            node_id=lease.node_id,
            lease_id=lease.lease_id,
            indices=lease.indices,
            reason="not finite",
            unusable_version=version,
        )
    )


def test_a_bad_adapter_of_a_tenant_is_no_fault_of_honest_nodes(bench: Callable[..., Any]) -> None:
    """Each node gets the adapter once, and continues with other work. Two refusals make the adapter unusable."""
    b = bench(**NO_TRAINING)
    for name in "ab":
        b.node(name, version=3)
    b.tell(AnswerWanted(group=asked(0, 1)))
    (first,) = ever_leased(b)
    cannot_use(b, first)
    assert not b.coordinator.is_unusable(OURS), "one node may have a broken engine"
    second = ever_leased(b)[-1]
    assert second.node_id != first.node_id
    cannot_use(b, second)
    assert b.coordinator.is_unusable(OURS) and len(ever_leased(b)) == 2, "no node gets it again"
    b.tell(AnswerWanted(group=asked(1, 1, version=OURS + 1)), AnswerWanted(group=asked(2, 1, version=0)))
    b.tell(Tick())
    assert {lease.group_id - FIRST_ANSWER_ID for lease in ever_leased(b)[2:]} == {1, 2}, "no node rests"


def test_a_node_alone_that_cannot_use_an_adapter_is_not_asked_again(bench: Callable[..., Any]) -> None:
    b = bench(**NO_TRAINING)
    b.node("a", version=3)
    b.tell(AnswerWanted(group=asked(0, 1)))
    cannot_use(b, ever_leased(b)[0])
    for _ in range(5):
        b.tell(Tick())
    assert len(ever_leased(b)) == 1
    b.node("b", version=3)
    assert [lease.node_id for lease in ever_leased(b)] == ["a", "b"]
    b.deliver(ever_leased(b)[1], reward=0.0)
    assert delivered(b) == [(0, 0, True)] and not b.coordinator.is_unusable(OURS)


def test_a_node_is_blamed_if_another_draws_with_the_adapter(bench: Callable[..., Any]) -> None:
    b = bench(**NO_TRAINING)
    b.node("a", version=3)
    b.tell(AnswerWanted(group=asked(0, 1)))
    b.deliver(ever_leased(b)[0], reward=0.0)
    b.node("b", version=3, capacity=9)
    b.tell(NodeReported(node_id="a", capacity=0, policy_version=3), AnswerWanted(group=asked(1, 1)))
    lease = ever_leased(b)[-1]
    assert lease.node_id == "b"
    cannot_use(b, lease)
    b.tell(AnswerWanted(group=asked(2, 1, version=0)))
    assert ever_leased(b)[-1] is lease, "b rests, and a has no capacity"
