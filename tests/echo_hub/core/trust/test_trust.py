"""Trust in nodes: which rollouts are checked, which nodes are convicted, and how a convicted node's rollouts are
dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echo_hub.core.accounting.effects import (
    ActionSettled,
    CheckRecorded,
    CheckRollout,
    DeliverAnswer,
    HastenChecks,
    LookUpReceipt,
    MeasureNumerics,
    RevokeLease,
    RolloutsDropped,
    RolloutsEvaluated,
    ScoreRecorded,
    SendLease,
    StandingRecorded,
    StepPlanned,
    TellOperator,
    TellStandby,
    TrustDecided,
)
from echo_hub.core.accounting.events import (
    AnswerWanted,
    CheckAbandoned,
    EvaluationWanted,
    LearnerReady,
    NodePardoned,
    NodeReported,
    NodeVouchedFor,
    NumericsMeasured,
    RolloutChecked,
    RolloutContinued,
    StepDone,
    Tick,
)
from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot, GroupRow, UnfinishedRollout
from echo_hub.core.answer_groups import FIRST_ANSWER_ID, AnswerGroup, AnswerMember, is_answer
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.lagging import POINT
from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.core.trust.rate import is_drawn, share_checked
from echo_hub.core.trust.screening import Seen, StepScreen
from echo_hub.core.trust.settings import TrustSettings
from echo_hub.core.trust.standing import Decision, StandingRow, StandingState
from echo_hub.core.trust.trust import REPEAT_S
from echo_shared.records.rollout import DrawnSpan, RolloutPayload
from echo_shared.wire.messages import Checked, DropReason, FinishReason, ReceiptState, StandbyReason
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION
from tests.echo_hub.core.trust.checked_run import (
    CHECKS_ALL,
    DOUBTFUL,
    F32,
    FORGED,
    HONEST,
    SETTINGS,
    arrive,
    join,
    name,
    proven,
    score,
    standing_of,
    verdict,
)
from tests.echo_hub.core.trust.simulated import engine, evidence, greedy, rollouts


def test_without_a_verifier_nothing_is_checked(world) -> None:
    bench = world(trust=TrustSettings())
    (lease, *_) = join(bench, "a")
    assert arrive(bench, lease) == []
    score(bench, lease)
    assert bench.of(ScoreRecorded) and bench.coordinator.status().trust.checks == {}


def test_a_new_nodes_work_waits_for_its_check(world) -> None:
    bench = world()
    (lease, *_) = join(bench, "a")
    assert arrive(bench, lease) == [name(lease)]
    score(bench, lease)
    assert bench.of(ScoreRecorded) == [], "the score is held until the verdict"
    assert bench.coordinator.status().trust.waiting_checks == 1
    verdict(bench, lease, HONEST)
    assert bench.of(CheckRecorded) == [CheckRecorded(rollout_id=name(lease), checked=Checked.PASSED)]
    assert [record.rollout_id for record in bench.of(ScoreRecorded)] == [name(lease)]
    assert [receipt.checked for receipt in bench.receipts("a")] == [Checked.PASSED, Checked.NO]
    assert standing_of(bench, "a").num_verified == 1


def evaluated(world, **settings: Any):
    """Return a coordinator under test (`Bench`) with one new node, and two leases of this node for a held-out problem:
    of the greedy completion and of the sampled one.
    """
    bench = world(evaluation_problems=1, evaluation_samples=1, run_seed=5, **settings)
    bench.tell(EvaluationWanted(policy_version=0))
    greedy, sampled = (lease for lease in join(bench, "a") if EvaluationGroup.of(lease.group_id) is not None)
    return bench, greedy, sampled


@pytest.mark.parametrize("which", [0, 1])
def test_a_new_nodes_evaluations_wait_for_their_checks_too(world, which: int) -> None:
    bench, *leases = evaluated(world)
    lease = leases[which]
    assert arrive(bench, lease) == [name(lease)]
    score(bench, lease)
    assert not bench.of(RolloutsEvaluated)
    verdict(bench, lease, FORGED)
    assert {record.reason for record in bench.of(RolloutsDropped)} >= {DropReason.FORGED}
    assert not bench.of(RolloutsEvaluated) and standing_of(bench, "a").state is StandingState.QUARANTINED


def test_nodes_that_check_are_not_asked_for_the_most_likely_ids(world) -> None:
    bench, greedy, sampled = evaluated(world, trust=replace(SETTINGS, by_nodes=True))
    arrive(bench, greedy)
    assert bench.coordinator.status().trust.waiting_checks == 0
    arrive(bench, sampled)
    assert bench.coordinator.status().trust.waiting_checks == 1


def test_a_class_learns_nothing_from_greedy_choices(world) -> None:
    """Greedy choices deviate only where two tokens are equally likely. If a class's rounding scale were learned from
    them, it would be so fine that sampled tokens convict honest nodes of the class.
    """
    for shown, learned in ((greedy([0.0] * 40), 0), (HONEST, HONEST.num_tokens)):
        bench = world(replace(proven("a"), num_verified=0), evaluation_problems=1, evaluation_samples=1, run_seed=5)
        bench.tell(EvaluationWanted(policy_version=0))
        lease = next(lease for lease in join(bench, "a") if EvaluationGroup.of(lease.group_id) is not None)
        assert arrive(bench, lease) == [name(lease)]
        verdict(bench, lease, shown)
        assert standing_of(bench, "a").shown.num_tokens == learned


def test_a_verdict_before_the_score_holds_nothing(world) -> None:
    bench = world()
    (lease, *_) = join(bench, "a")
    arrive(bench, lease)
    verdict(bench, lease, HONEST)
    score(bench, lease)
    assert bench.of(ScoreRecorded)


def test_a_check_that_is_abandoned_counts_as_none(world) -> None:
    bench = world()
    (lease, *_) = join(bench, "a")
    arrive(bench, lease)
    score(bench, lease)
    bench.tell(CheckAbandoned(rollout_id=name(lease)), CheckAbandoned(rollout_id=name(lease)))
    assert bench.of(ScoreRecorded) and not bench.of(CheckRecorded)
    assert bench.coordinator.status().trust.abandoned_checks == 1


def asked(
    world,
    *rows: StandingRow,
    only_checked: bool = False,
    temperature: float = 0.5,
    policy_version: int = 0,
    **settings: Any,
):
    """Return a coordinator under test (`Bench`) in which node a holds a lease with two samples for a tenant, and that
    lease.
    """
    bench = world(*rows, **settings)
    group = AnswerGroup(
        group_id=FIRST_ANSWER_ID,
        tenant_id="t",
        prompt_ids=np.array([5], np.int32),
        policy_version=policy_version,
        seed=7,
        sampling=SamplingParameters(temperature=temperature, max_tokens=9),
        is_checked=only_checked,
        members=(AnswerMember(request_id="r", num_samples=2),),
    )
    bench.tell(AnswerWanted(group=group))
    (lease,) = [lease for lease in join(bench, "a") if is_answer(lease.group_id)]
    return bench, lease


def test_a_new_nodes_samples_are_delivered_after_their_check(world) -> None:
    bench, lease = asked(world)
    assert arrive(bench, lease) == [name(lease, 0), name(lease, 1)]
    score(bench, lease)
    assert not bench.of(DeliverAnswer)
    verdict(bench, lease, HONEST)
    assert [answer.rollout_id for answer in bench.of(DeliverAnswer)] == [name(lease, 0)]
    verdict(bench, lease, FORGED, index=1)
    assert not [answer for answer in bench.of(DeliverAnswer) if answer.rollout_id == name(lease, 1)]
    assert DropReason.FORGED in {record.reason for record in bench.of(RolloutsDropped)}
    assert [lease.indices for lease in join(bench, "b") if is_answer(lease.group_id)] == [(1,)]


@pytest.mark.parametrize("only_checked", [False, True])
def test_a_proven_nodes_samples_wait_only_if_their_tenant_wants_it(world, only_checked: bool) -> None:
    bench, lease = asked(world, proven("a"), only_checked=only_checked, trust=CHECKS_ALL)
    assert len(arrive(bench, lease)) == 2
    score(bench, lease)
    assert len(bench.of(DeliverAnswer)) == (0 if only_checked else 2)
    verdict(bench, lease, FORGED)
    assert bench.of(TrustDecided)[-1].decision is Decision.QUARANTINED
    looked_up = [action.rollout_id for action in bench.of(LookUpReceipt) if action.is_verdict]
    assert looked_up == ([] if only_checked else [name(lease)])


def test_of_a_watched_node_only_doubtful_samples_are_drawn_again(world) -> None:
    """Samples of a watched node are delivered unless their own check raised doubt. If this node is the only one, a
    repeated lease would draw equal tokens.
    """
    bench, lease = asked(world, proven("a"), only_checked=True, trust=CHECKS_ALL)
    arrive(bench, lease)
    score(bench, lease)
    verdict(bench, lease, DOUBTFUL)
    assert not bench.of(DeliverAnswer) and bench.of(RolloutsDropped)
    verdict(bench, lease, HONEST, index=1)
    assert [answer.rollout_id for answer in bench.of(DeliverAnswer)] == [name(lease, 1)]


def test_all_samples_of_a_tenant_that_wants_it_are_checked(world) -> None:
    """The node was proven long ago, so the hub would check few of its rollouts otherwise."""
    for only_checked, count in ((False, 0), (True, 2)):
        bench, lease = asked(world, proven("a", num_verified=10**6), only_checked=only_checked, trust=SETTINGS)
        assert len(arrive(bench, lease)) == count


def test_an_abandoned_check_of_a_held_sample_is_repeated(world) -> None:
    bench, lease = asked(world)
    arrive(bench, lease)
    score(bench, lease)
    node = bench.coordinator._nodes.get("a")
    assert node.unchecked == 2
    bench.tell(CheckAbandoned(rollout_id=name(lease)))
    assert not bench.of(DeliverAnswer)
    assert node.unchecked == 1, "a sample that nobody can check must not keep the node from other work"
    due = bench.coordinator.due_at()
    assert due is not None and due <= bench.now + REPEAT_S
    bench.now += REPEAT_S - 1.0
    bench.tell(Tick())
    assert not [check for check in bench.of(CheckRollout) if check.rollout_id == name(lease)]
    bench.now += 1.0
    bench.tell(Tick())
    assert [check.is_urgent for check in bench.of(CheckRollout) if check.rollout_id == name(lease)] == [True]
    verdict(bench, lease, HONEST)
    assert [answer.rollout_id for answer in bench.of(DeliverAnswer)] == [name(lease)]
    assert node.unchecked == 1


def test_tenants_versions_do_not_delay_the_measurement_of_the_runs_own(world) -> None:
    """Roundings are measured again as the version number grows. If a tenant's far larger number counted, no later
    version would be measured.
    """
    bench, lease = asked(world, policy_version=FIRST_TENANT_VERSION + 5)
    assert lease.policy_version == FIRST_TENANT_VERSION + 5
    arrive(bench, lease)
    assert {action.policy_version for action in bench.of(MeasureNumerics)} == {0}


def test_nodes_that_check_compute_the_greedy_samples_of_tenants(world) -> None:
    bench, lease = asked(world, temperature=1e-9, trust=replace(SETTINGS, by_nodes=True))
    arrive(bench, lease)
    assert bench.coordinator.status().trust.waiting_checks == 2


def test_enough_verified_rollouts_prove_a_node(world) -> None:
    bench = world()
    leases = join(bench, "a")
    for lease, state in zip(leases[:2], [StandingState.NEW, StandingState.PROVEN], strict=True):
        arrive(bench, lease)
        verdict(bench, lease, HONEST)
        assert standing_of(bench, "a").state is state
    standing = bench.coordinator._trust._standings.of("a")
    assert (standing.shown, standing.taught) == (HONEST.counts, HONEST), "the class learns from this node from then on"


def test_few_tokens_prove_nothing(world) -> None:
    bench = world()
    for lease in join(bench, "a")[:3]:
        arrive(bench, lease)
        verdict(bench, lease, evidence(5))
    assert standing_of(bench, "a").state is StandingState.NEW


def test_a_proven_nodes_work_is_trained_before_its_check_ends(world) -> None:
    bench = world(proven("a"), groups_per_step=32)
    leases = join(bench, "a")
    checked = [lease for lease in leases if arrive(bench, lease)]
    assert 0 < len(checked) < len(leases) / 3
    score(bench, checked[0])
    assert bench.of(ScoreRecorded), "its score is recorded at once"


def test_the_number_of_batched_checks_of_a_node_follows_its_evidence(world) -> None:
    bench = world(proven("a", num_verified=64), groups_per_step=64, trust=replace(SETTINGS, least_checked=0.5))
    num_waiting, found = 0, []
    for lease in join(bench, "a"):
        num_waiting += len(arrive(bench, lease))
        if bench.of(HastenChecks):
            found.append(num_waiting)
            num_waiting = 0
    assert found and set(found) == {64 // 32 + 1}


def test_a_forged_rollout_convicts_and_is_dropped(world) -> None:
    bench = world()
    (lease, *others) = join(bench, "a")
    arrive(bench, lease)
    score(bench, lease)
    verdict(bench, lease, FORGED)
    assert bench.of(CheckRecorded) == [CheckRecorded(rollout_id=name(lease), checked=Checked.FAILED)]
    dropped = {record.reason: record.rollout_ids for record in bench.of(RolloutsDropped)}
    assert dropped[DropReason.FORGED] == (name(lease),)
    assert dropped[DropReason.QUARANTINED] == tuple(name(other) for other in others)
    assert {effect.lease_id for effect in bench.of(RevokeLease)} == {other.lease_id for other in others}
    assert bench.of(ScoreRecorded) == []
    (decision,) = bench.of(TrustDecided)
    assert (decision.node_id, decision.decision, decision.evidence) == ("a", Decision.QUARANTINED, FORGED.counts)
    assert decision.rollout_id == name(lease) and "20.3 nats of evidence from 1 checked rollout" in decision.reason
    (told,) = bench.of(TellStandby)
    assert (told.node_id, told.reason) == ("a", StandbyReason.QUARANTINED)
    assert standing_of(bench, "a").state is StandingState.QUARANTINED
    status = bench.coordinator.status().trust
    assert (status.quarantined, status.failed_checks) == (1, {str(F32): 1})


def test_a_quarantined_node_gets_no_work_and_others_take_its_slots(world) -> None:
    bench = world()
    (lease, *_) = join(bench, "a")
    arrive(bench, lease)
    verdict(bench, lease, FORGED)
    assert bench.of(SendLease) == []
    leases = join(bench, "b")
    assert {again.group_id for again in leases} >= {lease.group_id}
    bench.tell(NodeReported(node_id="a", capacity=100, policy_version=0), Tick())
    assert all(sent.node_id == "b" for sent in bench.of(SendLease))
    assert join(bench, "a") == []
    assert [told.reason for told in bench.of(TellStandby)] == [StandbyReason.QUARANTINED], "the node is told again"


def test_scored_rollouts_of_a_quarantined_node_are_dropped_too(world) -> None:
    bench = world(proven("a"), groups_per_step=32)
    leases = join(bench, "a")
    checked = [lease for lease in leases if arrive(bench, lease)]
    for lease in leases:
        score(bench, lease)
    assert bench.coordinator.status().groups_buffered == 32
    verdict(bench, checked[0], FORGED)
    status = bench.coordinator.status()
    assert (status.groups_buffered, status.groups_open, status.in_flight) == (0, 32, 0)


def test_rollouts_in_a_planned_batch_stay(world) -> None:
    bench = world(proven("a"), groups_per_step=32)
    bench.learner()
    leases = join(bench, "a")
    checked = [lease for lease in leases if arrive(bench, lease)]
    for lease in leases[:32]:
        score(bench, lease)
    assert bench.coordinator.status().training_step == 1
    verdict(bench, checked[0], FORGED)
    assert not any(record.reason is DropReason.FORGED for record in bench.of(RolloutsDropped))
    assert standing_of(bench, "a").state is StandingState.QUARANTINED
    bench.train(1)
    assert bench.coordinator.status().trained_steps == 1


def test_a_verdict_on_a_trained_rollout_looks_up_its_receipt_in_the_store(world) -> None:
    bench = world(proven("a"), groups_per_step=32)
    bench.learner()
    leases = join(bench, "a")
    checked = [lease for lease in leases[:32] if arrive(bench, lease)]
    for lease in leases[:32]:
        score(bench, lease)
    bench.train(1)
    verdict(bench, checked[0], HONEST)
    assert bench.of(CheckRecorded) and bench.of(LookUpReceipt) == [
        LookUpReceipt(node_id="a", rollout_id=name(checked[0]), is_verdict=True)
    ]


def test_doubt_makes_a_node_suspect_and_holds_its_work(world) -> None:
    bench = world(proven("a"), groups_per_step=32, trust=replace(SETTINGS, least_checked=0.5))
    leases = join(bench, "a")
    checked = [lease for lease in leases[:20] if arrive(bench, lease)]
    verdict(bench, checked[0], DOUBTFUL)
    assert standing_of(bench, "a").state is StandingState.PROVEN, "one token says little"
    verdict(bench, checked[1], DOUBTFUL)
    assert standing_of(bench, "a").state is StandingState.SUSPECT and standing_of(bench, "a").num_verified == 0
    assert not bench.of(TrustDecided)
    assert all(arrive(bench, lease) for lease in leases[20:])
    score(bench, leases[20])
    assert not bench.of(ScoreRecorded)


def test_a_node_with_odd_evidence_is_watched_until_it_is_outweighed(world) -> None:
    bench = world(proven("a"), groups_per_step=64)
    leases = join(bench, "a")
    first = next(number for number, lease in enumerate(leases) if arrive(bench, lease))
    verdict(bench, leases[first], DOUBTFUL)
    watched = leases[first + 1 : first + 11]
    assert [arrive(bench, lease) for lease in watched] == [[name(lease)] for lease in watched], (
        "all rollouts of a watched node are checked"
    )
    score(bench, watched[0])
    assert not bench.of(ScoreRecorded), "and held"
    for lease in watched:
        verdict(bench, lease, evidence(200))
    assert standing_of(bench, "a").state is StandingState.PROVEN
    rest = leases[first + 11 :]
    assert len([lease for lease in rest if arrive(bench, lease)]) < len(rest) / 3


def test_of_a_suspect_all_is_checked_that_no_step_has_consumed(world) -> None:
    bench = world(proven("a"), groups_per_step=32)
    leases = join(bench, "a")
    checked = [lease for lease in leases if arrive(bench, lease)]
    for lease in leases:
        score(bench, lease)
    verdict(bench, checked[0], evidence(10, forged=2))
    assert standing_of(bench, "a").state is StandingState.SUSPECT
    asked = {effect.rollout_id for effect in bench.of(CheckRollout)}
    assert asked == {name(lease) for lease in leases} - {name(lease) for lease in checked}
    assert len(bench.of(HastenChecks)) == 1, "pending checks now hold their rollouts as well, so they are hastened"
    assert bench.coordinator.status().groups_buffered == 1, "no step takes the other rollouts meanwhile"
    for rollout_id in (*asked, *map(name, checked[1:])):
        bench.tell(RolloutChecked(rollout_id=rollout_id, spans=(("a", HONEST),)))
    assert bench.coordinator.status().groups_buffered == 32


def test_a_biased_claim_convicts_in_every_class(world) -> None:
    """Honest 8-bit engines often err by almost half a nat, but not always in one direction, so a constant bias must
    convict.
    """
    bench = world(groups_per_step=64)
    bench.tell(NumericsMeasured(rounding="q8_0", policy_version=0, evidence=engine(7, 0.1)))
    biased = rollouts(8, 20, 0.1, shift=0.45)
    decided: list[TrustDecided] = []
    for lease, shown in zip(join(bench, "a", F32._replace(precision="q8_0")), biased, strict=False):
        arrive(bench, lease)
        verdict(bench, lease, shown)
        decided += bench.of(TrustDecided)
    assert [each.node_id for each in decided] == ["a"]
    assert "all too high" in decided[0].reason or "fewer bits" in decided[0].reason


def test_rounding_to_both_sides_convicts_no_node(world) -> None:
    bench = world(groups_per_step=64)
    for lease in join(bench, "a", F32._replace(precision="q4_k_m")):
        arrive(bench, lease)
        verdict(
            bench, lease, sum((evidence(1, error=error) for error in (-0.4, 0.3, -0.1, 0.1, -0.3, 0.4)), evidence())
        )
        assert not bench.of(TrustDecided)


def test_small_forgeries_add_up(world) -> None:
    """One forged token in forty does not convict a node by a single rollout, but by the sum of evidence over
    rollouts.
    """
    bench = world(proven("a"), groups_per_step=64)
    few = evidence(39, forged=1)
    verdicts = 0
    for lease in join(bench, "a"):
        if arrive(bench, lease):
            verdict(bench, lease, few)
            verdicts += 1
            if bench.of(TrustDecided):
                break
    assert bench.of(TrustDecided) and 2 < verdicts < 8


def test_the_forger_of_a_prefix_is_convicted_and_not_its_successor(world) -> None:
    bench = world(proven("a"), proven("b"), groups_per_step=32)
    lease = next(each for each in join(bench, "b") if is_drawn(SETTINGS.secret, name(each), SETTINGS.least_checked))
    join(bench, "a")
    payload = RolloutPayload(
        completion_ids=np.array([5, 7, 9], np.int32),
        behavior_logprobs=np.full(3, -0.5, np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.1,
        spans=(
            DrawnSpan(node_id="a", policy_version=0, num_tokens=2),
            DrawnSpan(node_id="b", policy_version=0, num_tokens=1),
        ),
    )
    bench.tell(bench.arrival(lease, 0, payload=payload))
    bench.tell(RolloutChecked(rollout_id=name(lease), spans=(("a", FORGED), ("b", HONEST))))
    assert [record.reason for record in bench.of(RolloutsDropped) if name(lease) in record.rollout_ids] == [
        DropReason.REVOKED
    ]
    assert bench.of(CheckRecorded) == [CheckRecorded(rollout_id=name(lease), checked=Checked.PASSED)]
    assert [decided.node_id for decided in bench.of(TrustDecided)] == ["a"]
    assert standing_of(bench, "b").num_verified == 101


def test_no_node_is_blamed_for_a_prefix_whose_sampler_a_restart_lost(world) -> None:
    bench = world(proven("b"), groups_per_step=32)
    (lease, *_) = join(bench, "b")
    bench.tell(replace(bench.arrival(lease, 0), is_unattributed=True))
    assert [record.reason for record in bench.of(RolloutsDropped)] == [DropReason.RETURNED]
    assert not bench.of(CheckRollout) and not bench.of(TrustDecided)


def test_fresh_keys_of_an_invented_class_suspend_nobodys_verdicts_but_their_own(world) -> None:
    bench = world(proven("honest"), proven("forger"), group_size=1, groups_per_step=64, trust=CHECKS_ALL)
    for node_id in "abc":
        (lease, *_) = join(bench, node_id, NumericsClass("invented", "f0", "toaster"), capacity=1)
        arrive(bench, lease)
        verdict(bench, lease, evidence(forged=16))
    assert bench.coordinator.status().trust.suspended, "their own sums are suspended"
    for node_id, numerics in (("forger", F32), ("new", F32)):
        lease = next(each for each in join(bench, node_id, numerics, capacity=1) if each.node_id == node_id)
        arrive(bench, lease)
        verdict(bench, lease, FORGED)
        assert standing_of(bench, node_id).state is StandingState.QUARANTINED


def test_fresh_keys_that_claim_anothers_class_suspend_no_verdict_on_a_proven_node(world) -> None:
    bench = world(proven("forger"), group_size=1, groups_per_step=64, trust=CHECKS_ALL)
    for node_id in "abc":
        (lease, *_) = join(bench, node_id, capacity=1)
        arrive(bench, lease)
        verdict(bench, lease, FORGED)
    lease = next(each for each in join(bench, "forger", capacity=1) if each.node_id == "forger")
    arrive(bench, lease)
    verdict(bench, lease, FORGED)
    assert standing_of(bench, "forger").state is StandingState.QUARANTINED


def test_a_node_that_changes_its_declared_precision_stays_checked(world) -> None:
    bench = world(groups_per_step=64)
    leases = join(bench, "a")
    for number, lease in enumerate(leases[:20]):
        precision = ("f32", "q4_k_m", "f0")[number % 3]
        bench.tell(NodeReported(node_id="a", capacity=100, policy_version=0, precision=precision))
        assert arrive(bench, lease) == [name(lease)]
        few = evidence(39, forged=1)
        verdict(bench, lease, few)
        if bench.of(TrustDecided):
            break
    assert standing_of(bench, "a").state is StandingState.QUARANTINED, "its sums are kept"


def test_no_node_is_convicted_of_a_fault_that_all_nodes_show(world) -> None:
    bench = world(group_size=1, groups_per_step=16)
    for node_id in "abc":
        (lease, *_) = join(bench, node_id)
        arrive(bench, lease)
        verdict(bench, lease, FORGED)
        common = node_id == "c"
        assert bool(bench.coordinator.status().trust.suspended) is common, "the third node makes the fault common"
        assert standing_of(bench, node_id).state == ("suspect" if common else "quarantined")
    assert bench.coordinator.status().trust.quarantined == 0
    assert {d.node_id for d in bench.of(TrustDecided) if d.decision is Decision.RELEASED} == {"a", "b"}
    assert any(record.reason is DropReason.FORGED for record in bench.of(RolloutsDropped)), (
        "no step trains on these rollouts"
    )
    assert f"{F32} on version 0" in bench.coordinator.status().trust.suspended


def test_a_pardoned_node_restarts(world) -> None:
    bench = world()
    (lease, *_) = join(bench, "a")
    arrive(bench, lease)
    verdict(bench, lease, FORGED)
    bench.tell(NodePardoned(node_id="a"), NodePardoned(node_id="never seen"))
    assert [(d.node_id, d.decision) for d in bench.of(TrustDecided)] == [
        ("a", Decision.PARDONED),
        ("never seen", Decision.PARDONED),
    ]
    row = standing_of(bench, "a")
    assert (row.state, row.num_verified, max(row.sums)) == (StandingState.NEW, 0, 0.0)
    assert [told.reason for told in bench.of(TellStandby)] == [None]
    (again, *_) = bench.of(SendLease)
    assert again.node_id == "a" and arrive(bench, again) == [name(again)]
    assert bench.coordinator.status().trust.quarantined == 0


def test_a_trusted_node_is_rarely_checked_and_its_work_does_not_wait(world) -> None:
    bench = world()
    (first, *_) = join(bench, "a")
    assert arrive(bench, first) == [name(first)], "all rollouts of a new node are checked"
    bench.tell(NodeVouchedFor(number=7, node_id="a", is_trusted=True))
    assert [(d.node_id, d.decision) for d in bench.of(TrustDecided)] == [("a", Decision.TRUSTED)]
    assert [(one.number, one.done, one.before, one.after) for one in bench.of(ActionSettled)] == [
        (7, True, StandingState.NEW, StandingState.PROVEN)
    ]
    assert [told.number for told in bench.of(TellOperator)] == [7]
    row = standing_of(bench, "a")
    settings = bench.coordinator.settings.trust
    assert share_checked(row.num_verified, settings.first_checked, settings.least_checked) == settings.least_checked


def test_a_trusted_node_can_be_convicted(world) -> None:
    bench = world()
    (lease, *_) = join(bench, "a")
    arrive(bench, lease)
    bench.tell(NodeVouchedFor(number=1, node_id="a", is_trusted=True))
    verdict(bench, lease, FORGED)
    assert standing_of(bench, "a").state is StandingState.QUARANTINED


def test_a_distrusted_node_must_prove_itself_again(world) -> None:
    bench = world(StandingRow(node_id="a", state=StandingState.PROVEN, numerics=F32, num_verified=5_000))
    (lease, *_) = join(bench, "a")
    bench.tell(NodeVouchedFor(number=2, node_id="a", is_trusted=False))
    assert [(one.done, one.before, one.after) for one in bench.of(ActionSettled)] == [
        (True, StandingState.PROVEN, StandingState.NEW)
    ]
    assert standing_of(bench, "a").num_verified == 0
    assert arrive(bench, lease) == [name(lease)]


def test_an_impossible_operator_request_is_refused_and_changes_nothing(world) -> None:
    bench = world(
        StandingRow(node_id="q", state=StandingState.QUARANTINED, numerics=F32),
        StandingRow(node_id="p", state=StandingState.PROVEN, numerics=F32, num_verified=99),
        StandingRow(node_id="s", state=StandingState.SUSPECT, numerics=F32),
    )
    for node_id, is_trusted, why in (
        ("nobody", True, "never checked"),
        ("nobody", False, "never checked"),
        ("q", True, "quarantine"),
        ("q", False, "quarantine"),
        ("p", True, "proven already"),
        ("s", False, "is not proven"),
    ):
        bench.tell(NodeVouchedFor(number=3, node_id=node_id, is_trusted=is_trusted))
        (settled,) = bench.of(ActionSettled)
        assert not settled.done and why in settled.detail
        assert bench.of(TrustDecided) == [] and bench.of(StandingRecorded) == []


def test_quarantine_survives_a_restart(world) -> None:
    row = StandingRow(node_id="a", state=StandingState.QUARANTINED, numerics=F32, reason="forged", since=5.0)
    bench = world(row)
    assert bench.coordinator.status().trust.quarantined == 1
    assert join(bench, "a") == []
    assert [(told.reason, told.detail) for told in bench.of(TellStandby)] == [(StandbyReason.QUARANTINED, "forged")]
    bench.tell(NodePardoned(node_id="a"))
    assert bench.of(SendLease)


def test_another_engine_is_to_prove_itself_again(world) -> None:
    bench = world(proven("a"))
    (lease, *_) = join(bench, "a", F32._replace(precision="q4_k_m"))
    assert standing_of(bench, "a").state is StandingState.NEW
    assert arrive(bench, lease) == [name(lease)]


def test_the_learners_hint_makes_a_node_suspect(world) -> None:
    bench = world(proven("a"), proven("b"), groups_per_step=32)
    leases = join(bench, "a")
    usual = Evidence(draws=(900, 50, 30, 15, 4, 1), claims=(900, 50, 30, 15, 4, 1))
    odd = Evidence(draws=(80, 0, 0, 0, 0, 20), claims=(100, 0, 0, 0, 0, 0))
    bench.coordinator._trust.screened(1, [Seen("b", usual), Seen("a", odd)], 1_000.0)
    assert all(arrive(bench, lease) == [name(lease)] for lease in leases[:5])
    for lease in leases[:5]:
        verdict(bench, lease, HONEST)
    assert standing_of(bench, "a").state is StandingState.PROVEN, "acquitted"
    bench.coordinator._trust.screened(1, [Seen("b", usual), Seen("a", odd)], 1_000.0)
    bench.tell(Tick())
    assert not bench.of(StandingRecorded), "the node is not suspected again at once"


def lag(bench: Any, *node_ids: str, steps: int = 40) -> None:
    """Report the learner's findings of `steps - 1` steps. Only the first node's mismatch (KL divergence from the
    learner) grows, from step 13 on.
    """
    for step in range(1, steps):
        grown = 5e-4 * 1.4 ** max(0, step - 12)
        seen = [
            Seen(node_id, Evidence(draws=(10,) + (0,) * 5, claims=(10,) + (0,) * 5, mismatch_kl=10 * kl))
            for node_id, kl in zip(node_ids, (grown, *[5e-4] * len(node_ids)), strict=False)
            for _ in range(POINT)
        ]
        bench.coordinator._trust.screened(step, seen, 1_000.0)
    bench.tell(Tick())


def test_a_node_that_lags_is_checked_if_there_is_a_verifier(world) -> None:
    bench = world(proven("a"), proven("b"), groups_per_step=32)
    leases = join(bench, "a")
    lag(bench, "a", "b")
    assert "or an older one, not with the versions that it names" in standing_of(bench, "a").reason
    assert arrive(bench, leases[0]) == [name(leases[0])]


def test_a_lagging_node_is_quarantined_without_checks(world) -> None:
    bench = world(trust=TrustSettings())
    leases = join(bench, "a")
    join(bench, "b")
    arrive(bench, leases[0])
    lag(bench, "a", "b")
    (decision,) = bench.of(TrustDecided)
    assert (decision.node_id, decision.decision) == ("a", Decision.QUARANTINED)
    assert "it likely samples with version " in decision.reason
    dropped = {each for effect in bench.of(RolloutsDropped) for each in effect.rollout_ids}
    assert name(leases[0]) in dropped, "rollouts that no step has consumed are dropped"
    bench.tell(NodePardoned(node_id="a"))
    assert standing_of(bench, "a").state is StandingState.NEW and not bench.coordinator.status().trust.lagging


def test_a_node_that_lags_alone_is_reported_and_not_quarantined(world) -> None:
    bench = world(trust=TrustSettings())
    join(bench, "a")
    lag(bench, "a")
    assert not bench.of(TrustDecided)
    ((node_id, what),) = bench.coordinator.status().trust.lagging
    assert node_id == "a" and "or the run itself has changed" in what


def test_the_turn_of_an_episode_continues_after_its_check(world) -> None:
    bench = world(multi_turn=True)
    (lease, *_) = join(bench, "a")
    arrive(bench, lease)
    bench.tell(RolloutContinued(rollout_id=name(lease), observation_ids=np.array([9], np.int32)))
    assert not [sent for sent in bench.of(SendLease) if sent.turn == 1]
    verdict(bench, lease, HONEST)
    assert [sent.turn for sent in bench.of(SendLease) if sent.group_id == lease.group_id] == [1]


def test_turns_after_a_forged_turn_are_dropped_with_it(world) -> None:
    bench = world(proven("a"), proven("b"), multi_turn=True, groups_per_step=32)
    leases = join(bench, "a")
    checked = next(lease for lease in leases if arrive(bench, lease))
    bench.tell(RolloutContinued(rollout_id=name(checked), observation_ids=np.array([9], np.int32)))
    (second,) = [sent for sent in bench.of(SendLease) if (sent.group_id, sent.turn) == (checked.group_id, 1)]
    join(bench, "b")
    verdict(bench, checked, FORGED)
    ends = {name_: record.reason for record in bench.of(RolloutsDropped) for name_ in record.rollout_ids}
    assert ends[name(checked)] is DropReason.FORGED and name(second) in ends
    again = [sent for sent in bench.of(SendLease) if sent.group_id == checked.group_id]
    assert [(sent.node_id, sent.turn, sent.seed) for sent in again] == [("b", 0, checked.seed)]


def test_rollouts_received_before_a_restart_are_checked(world) -> None:
    rows = tuple(
        UnfinishedRollout(
            rollout_id=f"{lease}-0",
            lease_id=lease,
            node_id="a",
            group_id=lease,
            index=0,
            policy_version=0,
            deadline=2_000.0,
            state=ReceiptState.RECEIVED,
            num_tokens=2,
            reward=None,
            checked=checked,
        )
        for lease, checked in ((1, Checked.NO), (2, Checked.PASSED))
    )
    groups = tuple(GroupRow(group_id=group_id, seed=5) for group_id in (1, 2))
    bench = world(snapshot=CoordinatorSnapshot(next_group_id=3, next_lease_id=3, groups=groups, rollouts=rows))
    assert [effect.rollout_id for effect in bench.of(CheckRollout)] == ["1-0"]


def test_a_node_whose_rollouts_the_learner_rejected_is_suspect(world) -> None:
    bench = world(proven("a"), groups_per_step=2)
    bench.tell(LearnerReady(policy_version=0))
    leases = join(bench, "a")[:2]
    for lease in leases:
        for rollout_id in arrive(bench, lease):
            bench.tell(RolloutChecked(rollout_id=rollout_id, spans=((lease.node_id, HONEST),)))
        score(bench, lease)
    assert bench.of(StepPlanned)
    bench.tell(StepDone(step=1, metrics={}, screen=StepScreen(left_out=(1,), suspects=(1,))))
    assert standing_of(bench, "a").state is StandingState.SUSPECT


def test_rollouts_that_wait_for_a_check_use_their_nodes_window(world) -> None:
    bench = world(groups_per_step=64, first_window=4)
    leases = join(bench, "a")
    assert len(leases) == 4
    for lease in leases:
        arrive(bench, lease)
        score(bench, lease)
        assert not bench.of(SendLease), "no more work before the first verdict"
    verdict(bench, leases[0], HONEST)
    assert len(bench.of(SendLease)) == 2, "one place for the settled rollout, and the window grows by one"
    bench.tell(CheckAbandoned(rollout_id=name(leases[1])))
    assert bench.of(SendLease), "an abandoned check holds nothing up"
