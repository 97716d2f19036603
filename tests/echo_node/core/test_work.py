"""A node's work loop (its decisions, without I/O), event by event: what it fetches and sends, and how it ends."""

from typing import get_args

import numpy as np

from echo_node.core.effects import (
    AbandonFetch,
    AddPolicy,
    AskForReceipts,
    CancelLease,
    DropPolicy,
    FetchArtefact,
    RecordReceipts,
    ResendSpooled,
    ScoreCompletion,
    SendMessage,
    SpoolLease,
    SpoolRollout,
    StartEngine,
    Stop,
    SubmitGroup,
)
from echo_node.core.events import (
    CompletionScored,
    Disconnected,
    DrainRequested,
    EngineLost,
    EngineReady,
    Event,
    FetchFailed,
    FinishRequested,
    LeaseCancelled,
    LeaseFailed,
    NodeTick,
    RolloutsFinished,
    Spooled,
    SpoolFailed,
)
from echo_node.core.work import DRAIN_S, HANDLERS
from echo_shared.sampling.scoring import Scored
from echo_shared.wire.messages import (
    MAX_CHECKS,
    CheckLease,
    CheckResult,
    Fetched,
    Goodbye,
    Have,
    LeaseReturned,
    NodeStatus,
    PolicyPublished,
    Receipt,
    Receipts,
    ReceiptState,
    Rollout,
    Standby,
    StandbyReason,
    VersionSpan,
    Way,
)
from tests.echo_node.core.loop_parts import WIDTH, Node, fetched, finished, here, lease, offer, welcome
from tests.echo_node.core.test_policies import offer as real_offer


def test_exactly_the_declared_events_are_handled() -> None:
    assert set(HANDLERS) == set(get_args(Event))


def test_a_node_reports_why_it_takes_no_work() -> None:
    node = Node()
    assert node.loop.held_back_by(0.0) == ("the engine is not up",)
    node.ready()
    assert node.loop.held_back_by(0.0) == ()
    node(SpoolFailed(what="disk full"))
    for n in range(1, 4):
        node(lease(n), LeaseFailed(lease_id=n, what="no"))
    assert node.loop.held_back_by(0.5) == ("the spool cannot be written", "groups keep failing")
    assert node.loop.held_back_by(1.0) == ("the spool cannot be written",)
    node(DrainRequested(reason="enough"), EngineLost(what="killed"))
    assert node.loop.held_back_by(1.0) == (
        "the engine is not up",
        "the spool cannot be written",
        "the node is leaving",
    )


def test_the_reason_for_no_work_is_known_until_work_comes() -> None:
    node = Node()
    node.ready()
    assert node.loop.standby == ""
    news = Standby(reason=StandbyReason.TOO_SLOW, detail="Version and rollout take it about 90 s.")
    node(news)
    assert node.loop.standby.endswith("Version and rollout take it about 90 s.")
    node(lease(1))
    assert node.loop.standby == ""
    for ends in (Standby(reason=None), Disconnected()):
        node(news, ends)
        assert node.loop.standby == ""


def test_from_welcome_to_the_first_rollout() -> None:
    node = Node()
    node(welcome())
    assert node.turn[:3] == (ResendSpooled(), AskForReceipts(), FetchArtefact(policy_version=None, offer=offer(-1)))
    assert node.sent(NodeStatus)[0].activity == "preparing"
    node(here(None))
    assert node.of(StartEngine) == [StartEngine(after_s=0.0)]
    assert node.sent(Fetched) == [fetched(None)]
    node(EngineReady(width=WIDTH))
    assert node.of(AddPolicy) == [AddPolicy(policy_version=0)]
    status = node.sent(NodeStatus)[0]
    assert (status.activity, status.capacity, status.policy_version) == ("waiting", 2 * WIDTH, 0)
    node(lease(1))
    assert node.of(SpoolLease) == [SpoolLease(lease_id=1, indices=(0, 1))]
    assert node.of(SubmitGroup)[0].request.indices == (0, 1)
    assert node.sent(NodeStatus)[0].activity == "sampling"


def test_after_a_reconnect_the_hub_is_told_the_present_versions() -> None:
    node = Node().ready()(PolicyPublished(policy_version=1, offer=offer(1)), here(1))
    assert node.sent(Fetched) == [fetched(1)]
    node(Disconnected(), PolicyPublished(policy_version=2, offer=offer(2)), here(2))
    assert node.sent(Fetched) == []
    node(welcome(2))
    assert node.sent(Fetched) == [fetched(None), fetched(1), fetched(2)]


def test_the_keyframe_of_an_older_version_does_not_make_it_the_newest() -> None:
    node = Node().ready()(PolicyPublished(policy_version=3, offer=offer(3)), here(3))
    node(PolicyPublished(policy_version=2, offer=offer(2)))
    assert node.loop.newest_published == 3 and node.of(FetchArtefact) == []
    node(lease(1, version=2))
    assert node.of(FetchArtefact) == [FetchArtefact(policy_version=2, offer=offer(2))]


def test_a_superseded_fetch_is_judged_by_the_progress_that_ticks_bring() -> None:
    node = Node().ready()(PolicyPublished(policy_version=1, offer=offer(1)))
    node(PolicyPublished(policy_version=2, offer=offer(2)))
    node(NodeTick(progress={1: (90, 100), 2: (0, 100)}))
    assert node.of(AbandonFetch) == []
    node(NodeTick(progress={1: (90, 100), 2: (95, 100)}))
    assert node.of(AbandonFetch) == [AbandonFetch(policy_version=1)]


def test_the_late_arrival_of_an_abandoned_version_is_not_reported() -> None:
    node = Node().ready()(PolicyPublished(policy_version=1, offer=offer(1)))
    node(PolicyPublished(policy_version=2, offer=offer(2)), here(2))
    assert node.of(AbandonFetch) == [AbandonFetch(policy_version=1)]
    node(here(1))
    assert node.ever_sent(Fetched) == [fetched(None), fetched(2)]


def test_a_push_that_the_node_cannot_take_now_is_declined() -> None:
    def published(version: int) -> PolicyPublished:
        offer = real_offer(version).model_copy(update={"way": Way.INLINE})
        return PolicyPublished(policy_version=version, offer=offer)

    def declined(version: int) -> list[Have]:
        return [Have(info_hash=bytes.fromhex(f"{version:038x}00"), pieces=(), wanted=False)]

    node = Node()(welcome())
    node(published(1))
    assert node.sent(Have) == declined(1)  # The node declines the push, because it lacks the base model.
    node(here(None))
    assert node.of(FetchArtefact) == [FetchArtefact(policy_version=1, offer=published(1).offer)]
    node(published(2))
    assert node.sent(Have) == []
    node(FetchFailed(policy_version=2, what="The disk is full."))
    assert node.sent(Have) == declined(2)
    node(DrainRequested(reason="the end"), published(3))
    assert node.sent(Have) == declined(3) and node.of(FetchArtefact) == []


def test_a_rollout_is_spooled_before_it_is_sent() -> None:
    node = Node().ready()(lease(1), finished(1, 0))
    (spool,) = node.of(SpoolRollout)
    assert spool.rollout.rollout_id == "1-0"
    assert node.sent(Rollout) == []
    node(Spooled(rollouts=(spool.rollout,)))
    assert node.sent(Rollout) == [spool.rollout]


def test_rollouts_that_end_together_are_spooled_and_reported_once() -> None:
    together = finished(1, 0).rollouts + finished(2, 1).rollouts + finished(1, 1).rollouts + finished(2, 0).rollouts
    node = Node().ready()(lease(1, deadline_s=1.2), lease(2, deadline_s=1.2))
    node(RolloutsFinished(rollouts=together, tokens_per_s=10.0))
    assert [spool.rollout.rollout_id for spool in node.of(SpoolRollout)] == ["1-0", "2-1", "1-1", "2-0"]
    assert [status.activity for status in node.sent(NodeStatus)] == ["waiting"]
    assert node.loop.held_rollouts == 0


def test_without_a_connection_a_rollout_waits_for_the_next_welcome() -> None:
    node = Node().ready()(lease(1), Disconnected(), finished(1, 0))
    node(Spooled(rollouts=(node.of(SpoolRollout)[0].rollout,)))
    assert node.ever_sent(Rollout) == []
    assert ResendSpooled() in node(welcome()).turn


def test_no_more_is_asked_for_than_can_be_done_in_time() -> None:
    node = Node().ready()
    assert node.ever_sent(NodeStatus)[-1].capacity == 2 * WIDTH
    # At 50 tokens/s and 2 tokens per rollout, 15 rollouts fit into half of the deadline of 1.2 s.
    node(lease(1, deadline_s=1.2), finished(1, 0))
    assert node.loop.status(node.now).capacity == 2 * WIDTH
    node(lease(2, deadline_s=0.12))
    assert node.sent(NodeStatus)[-1].capacity == 1
    node(EngineLost(what="killed"), EngineReady(width=WIDTH, tokens_per_s=200.0))
    assert node.sent(NodeStatus)[-1].capacity == 6


def test_a_full_disk_stops_the_intake_until_space_returns() -> None:
    node = Node().ready()(lease(1), finished(1, 0))
    rollout = node.of(SpoolRollout)[0].rollout
    node(SpoolFailed(what="disk full"))
    assert node.sent(NodeStatus)[-1].capacity == 0
    node(Spooled(rollouts=(rollout,)))
    assert node.sent(Rollout) == [rollout]
    assert node.sent(NodeStatus)[-1].capacity == 2 * WIDTH


def check(version: int = 0) -> CheckLease:
    return CheckLease(
        rollout_id="7-0",
        prompt_ids=np.array([1], np.int32),
        completion_ids=np.array([2], np.int32),
        versions=(VersionSpan(policy_version=version, num_tokens=1),),
        temperature=1.0,
        deadline_s=50.0,
    )


def test_another_nodes_completion_is_scored_with_its_version() -> None:
    """If the engine has dropped the version, the node loads it from disk for the check, and drops it afterwards."""
    node = Node()(welcome(1), here(None), here(1), EngineReady(width=WIDTH, scores=True))
    assert node.sent(NodeStatus)[-1].checks == MAX_CHECKS
    for version in (2, 3, 4):
        node(PolicyPublished(policy_version=version, offer=offer(version)), here(version))
    assert DropPolicy(policy_version=1) in node.wanted
    node(check(version=1))
    assert node.of(AddPolicy) == [AddPolicy(policy_version=1)]
    assert [one.request.rollout_id for one in node.of(ScoreCompletion)] == ["7-0"]
    found = np.array([0.5], np.float32)
    node(CompletionScored(scored=Scored(rollout_id="7-0", below=found, logprobs=-found)))
    assert [result.below.tolist() for result in node.sent(CheckResult)] == [[0.5]]
    assert DropPolicy(policy_version=1) in node.turn


def test_a_node_that_cannot_score_or_leaves_declines_checks() -> None:
    node = Node().ready()
    assert node.sent(NodeStatus)[-1].checks == 0
    assert [len(result.below) for result in node(check()).sent(CheckResult)] == [0]
    node = Node()(welcome(), here(None), EngineReady(width=WIDTH, scores=True), check())
    assert [len(result.below) for result in node(DrainRequested(reason="bye")).sent(CheckResult)] == [0]
    node = Node()(welcome(), here(None), EngineReady(width=WIDTH, scores=True), check())
    assert [len(result.below) for result in node(EngineLost(what="it died")).sent(CheckResult)] == [0]
    assert node.sent(NodeStatus)[-1].checks == 0


def test_receipts_are_recorded() -> None:
    receipts = (Receipt(rollout_id="1-0", state=ReceiptState.RECEIVED),)
    assert Node().ready()(Receipts(receipts=receipts)).of(RecordReceipts) == [RecordReceipts(receipts=receipts)]


def test_receipts_that_were_missed_are_asked_for_after_every_welcome() -> None:
    node = Node().ready()(Disconnected())
    assert node.of(AskForReceipts) == []
    assert node(welcome()).of(AskForReceipts) == [AskForReceipts()]


def test_the_heartbeat_comes_in_time_and_news_at_once() -> None:
    node = Node().ready()
    assert node(NodeTick(), after_s=4.9).sent(NodeStatus) == []
    assert len(node(NodeTick(), after_s=0.1).sent(NodeStatus)) == 1
    assert len(node(lease(1)).sent(NodeStatus)) == 1


def test_the_base_is_fetched_again_after_a_failure() -> None:
    node = Node()(welcome(), FetchFailed(policy_version=None, what="nobody serves it"))
    assert node(NodeTick(), after_s=0.9).of(FetchArtefact) == []
    assert len(node(NodeTick(), after_s=0.1).of(FetchArtefact)) == 1


def test_draining_reports_itself_returns_leases_waits_for_receipts_and_stops() -> None:
    node = Node().ready()(lease(1), finished(1, 0))
    rollout = node.of(SpoolRollout)[0].rollout
    node(DrainRequested(reason="enough"))
    messages = [e.message for e in node.turn if isinstance(e, SendMessage)]
    assert [type(m) for m in messages] == [NodeStatus]
    assert (messages[0].activity, messages[0].capacity) == ("draining", 0)
    assert node.of(CancelLease) == [CancelLease(lease_id=1)]
    assert node(lease(2)).sent(LeaseReturned)[0].lease_id == 2
    assert node.of(Stop) == []
    (returned,) = node(LeaseCancelled(lease_id=1)).sent(LeaseReturned)
    assert (returned.indices, returned.reason) == ((1,), "enough")
    node(Spooled(rollouts=(rollout,)))
    assert node.sent(Rollout) == [rollout]
    assert node.of(Stop) == []
    node(Receipts(receipts=(Receipt(rollout_id="1-0", state=ReceiptState.RECEIVED),)))
    assert isinstance(node.turn[-2], SendMessage) and isinstance(node.turn[-2].message, Goodbye)
    assert node.turn[-1] == Stop()
    assert node(NodeTick()).turn == ()


def test_finishing_completes_held_leases_and_takes_no_new_ones() -> None:
    node = Node().ready()(lease(1, count=1), FinishRequested(reason="enough"))
    assert node.sent(NodeStatus)[0].capacity == 0 and node.of(CancelLease) == []
    assert node(lease(2)).sent(LeaseReturned)[0].reason == "the node is leaving"
    (rollout,) = (effect.rollout for effect in node(finished(1, 0)).of(SpoolRollout))
    assert node.of(Stop) == []
    node(Spooled(rollouts=(rollout,)))
    node(Receipts(receipts=(Receipt(rollout_id="1-0", state=ReceiptState.RECEIVED),)))
    assert node.of(Stop) == [Stop()]


def test_draining_does_not_wait_for_ever() -> None:
    node = Node(unacked=["9-9"]).ready()(DrainRequested(reason="enough"))
    assert node.of(Stop) == []
    assert node(NodeTick(), after_s=DRAIN_S).of(Stop) == [Stop()]


def test_draining_without_a_connection_is_done_at_once() -> None:
    assert Node(unacked=["9-9"]).ready()(Disconnected(), DrainRequested(reason="enough")).of(Stop) == [Stop()]
