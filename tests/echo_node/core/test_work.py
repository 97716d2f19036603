"""The work loop, event by event; then a random walk that checks what must hold on every path."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar, get_args

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_node.core.effects import (
    AbandonFetch,
    AddPolicy,
    AskForReceipts,
    CancelLease,
    DropPolicy,
    Effect,
    EndEngine,
    FetchArtefact,
    ForgetLease,
    RecordReceipts,
    RemoveArtefact,
    ResendSpooled,
    ResumeEngine,
    ScoreCompletion,
    Send,
    SpoolLease,
    SpoolRollout,
    StartEngine,
    Stop,
    SubmitGroup,
    SuspendEngine,
)
from echo_node.core.engine_life import STEADY_S, USUAL_WIDTH
from echo_node.core.events import (
    ArtefactReady,
    CompletionScored,
    Disconnected,
    DrainRequested,
    EngineLost,
    EngineOutdated,
    EngineReady,
    Event,
    FetchFailed,
    FinishRequested,
    GroupFailed,
    Holding,
    LeaseCancelled,
    LossCause,
    PolicyPrepared,
    RolloutFinished,
    RolloutsDrawn,
    Spooled,
    SpoolFailed,
    Tick,
)
from echo_node.core.manners import Hold, HoldReason
from echo_node.core.work import DRAIN_S, HANDLERS, LAST_WORDS_S, WorkLoop
from echo_node.core.yielding import YIELD_S
from echo_shared.messages import (
    MAX_CHECKS,
    ArtefactOffer,
    CheckLease,
    CheckResult,
    DropReason,
    Fetched,
    FinishReason,
    Goodbye,
    Have,
    KeyframeWanted,
    Lease,
    LeasedPrefix,
    LeaseReturned,
    LeaseRevoked,
    NodeStatus,
    PolicyPublished,
    Receipt,
    Receipts,
    ReceiptState,
    Rollout,
    RolloutParts,
    Standby,
    StandbyReason,
    VersionSpan,
    Way,
    Welcome,
    rollout_id,
)
from echo_shared.sampling import DrawnPart, FinishedRollout
from echo_shared.scoring import Scored
from tests.echo_node.core.test_policies import offer as real_offer

E = TypeVar("E")
M = TypeVar("M")
WIDTH = 4


def offer(version: int) -> ArtefactOffer:
    return ArtefactOffer(manifest=str(version).encode(), signature=bytes(64), torrent=b"", web_seed_path="/a/")


def welcome(version: int = 0) -> Welcome:
    return Welcome(
        run_id="run",
        run_name="run",
        node_id="node",
        base=offer(-1),
        policy=offer(version) if version else None,
        policy_version=version,
        tracker_path="/announce/k",
        heartbeat_s=5.0,
        run_keys=(),
    )


def lease(lease_id: int, *, version: int = 0, count: int = 2, deadline_s: float = 100.0) -> Lease:
    return Lease(
        lease_id=lease_id,
        group_id=lease_id,
        indices=tuple(range(count)),
        prompt_ids=np.array([1, 2], np.int32),
        seed=9,
        policy_version=version,
        temperature=1.0,
        max_tokens=8,
        stop_ids=(1,),
        deadline_s=deadline_s,
    )


def fetched(version: int | None) -> Fetched:
    return Fetched(info_hash=bytes(20), policy_version=version, seconds=1.0, swarm_bytes=5, web_seed_bytes=0)


def here(version: int | None) -> ArtefactReady:
    return ArtefactReady(policy_version=version, fetched=fetched(version))


def finished(lease_id: int, index: int, version: int = 0) -> RolloutFinished:
    rollout = FinishedRollout(
        lease_id=lease_id,
        group_id=lease_id,
        index=index,
        policy_version=version,
        completion_ids=np.array([4, 1], np.int32),
        behavior_logprobs=np.array([-0.5, -0.1], np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.1,
    )
    return RolloutFinished(rollout=rollout, tokens_per_s=50.0)


class Node:
    """A work loop, its clock, and all that it wanted so far."""

    def __init__(self, *, unfinished: dict[int, tuple[int, ...]] | None = None, unacked: Iterable[str] = ()) -> None:
        self.loop = WorkLoop(
            capacity_factor=2, unfinished=unfinished or {}, unacked=unacked, on_disk={}, jitter=lambda: 0.0
        )
        self.now = 0.0
        self.wanted: list[Effect] = []
        self.turn: tuple[Effect, ...] = ()

    def __call__(self, *events: Event, after_s: float = 0.0) -> "Node":
        """The turn is what the last event led to."""
        self.now += after_s
        for event in events:
            self.turn = self.loop.handle(event, self.now)
            self.wanted += self.turn
        return self

    def ready(self, version: int = 0) -> "Node":
        """Welcomed, base there, engine up."""
        return self(welcome(version), here(None), EngineReady(width=WIDTH))

    def of(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.turn if isinstance(effect, kind)]

    def sent(self, kind: type[M]) -> list[M]:
        return [effect.message for effect in self.turn if isinstance(effect, Send) and isinstance(effect.message, kind)]

    def ever_sent(self, kind: type[M]) -> list[M]:
        return [e.message for e in self.wanted if isinstance(e, Send) and isinstance(e.message, kind)]


def test_every_event_is_handled_and_nothing_else() -> None:
    assert set(HANDLERS) == set(get_args(Event))


def test_a_node_says_why_it_asks_for_no_work() -> None:
    node = Node()
    assert node.loop.held_back_by(0.0) == ("the engine is not up",)
    node.ready()
    assert node.loop.held_back_by(0.0) == ()
    node(SpoolFailed(what="disk full"))
    for n in range(1, 4):
        node(lease(n), GroupFailed(lease_id=n, what="no"))
    assert node.loop.held_back_by(0.5) == ("the spool cannot be written", "groups keep failing")
    assert node.loop.held_back_by(1.0) == ("the spool cannot be written",)
    node(DrainRequested(reason="enough"), EngineLost(what="killed"))
    assert node.loop.held_back_by(1.0) == (
        "the engine is not up",
        "the spool cannot be written",
        "the node is leaving",
    )


def test_why_there_is_no_work_is_known_until_there_is() -> None:
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


def test_a_hub_is_told_anew_what_is_here() -> None:
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


def test_the_keyframe_is_asked_for_when_a_delta_cannot_be_read() -> None:
    node = Node().ready()
    delta = offer(2).model_copy(update={"delta_parent": 1})
    node(PolicyPublished(policy_version=1, offer=offer(1)), here(1))
    node(PolicyPublished(policy_version=2, offer=delta))
    assert node.of(FetchArtefact) == [FetchArtefact(policy_version=2, offer=delta)]
    node(FetchFailed(policy_version=2, what="cannot be read", unreadable=True))
    assert node.sent(KeyframeWanted) == [KeyframeWanted(policy_version=2)]
    node(Disconnected(), Tick(), after_s=0.1)
    node(welcome(2).model_copy(update={"policy": delta}))
    assert node.sent(KeyframeWanted) == [KeyframeWanted(policy_version=2)]


def test_a_superseded_fetch_is_judged_by_the_progress_that_ticks_bring() -> None:
    node = Node().ready()(PolicyPublished(policy_version=1, offer=offer(1)))
    node(PolicyPublished(policy_version=2, offer=offer(2)))
    node(Tick(progress={1: (90, 100), 2: (0, 100)}))
    assert node.of(AbandonFetch) == []
    node(Tick(progress={1: (90, 100), 2: (95, 100)}))
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
    assert node.sent(Have) == declined(1)  # There is no base yet.
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


def test_without_a_connection_a_rollout_waits_for_the_next_welcome() -> None:
    node = Node().ready()(lease(1), Disconnected(), finished(1, 0))
    node(Spooled(rollouts=(node.of(SpoolRollout)[0].rollout,)))
    assert node.ever_sent(Rollout) == []
    assert ResendSpooled() in node(welcome()).turn


def test_a_lease_is_fetched_for_then_sampled_by_exactly_its_version() -> None:
    node = Node().ready()
    node(PolicyPublished(policy_version=1, offer=offer(1)))
    node(lease(7, version=1))
    assert node.of(SubmitGroup) == []
    node(here(1))
    kinds = [type(effect) for effect in node.turn]
    assert kinds.index(AddPolicy) < kinds.index(SubmitGroup)
    assert node.of(SubmitGroup)[0].request.policy_version == 1


def test_a_lease_may_bring_the_offer_of_its_version() -> None:
    node = Node().ready()
    node(PolicyPublished(policy_version=9, offer=offer(9)))
    node(lease(7, version=2).model_copy(update={"offer": offer(2)}))
    assert FetchArtefact(policy_version=2, offer=offer(2)) in node.turn and node.sent(LeaseReturned) == []
    assert node.loop.newest_published == 9
    node(here(2))
    assert node.of(SubmitGroup)[0].request.policy_version == 2


def test_a_lease_for_a_version_that_nobody_offers_is_returned() -> None:
    node = Node().ready()(lease(1, version=5))
    assert node.sent(LeaseReturned)[0].indices == (0, 1)
    assert ForgetLease(lease_id=1) in node.turn


def test_a_repeated_lease_is_held_once() -> None:
    node = Node().ready()(lease(1), lease(1))
    assert node.of(SubmitGroup) == []
    assert node.loop.held_rollouts == 2


def test_a_lease_that_comes_again_is_sampled_only_where_nothing_is_on_its_way() -> None:
    node = Node(unacked=["1-0"]).ready()(lease(1))
    assert node.of(SubmitGroup)[0].request.indices == (1,)


def test_a_revoked_lease_is_cancelled_and_its_late_rollouts_are_ignored() -> None:
    node = Node().ready()(lease(1), LeaseRevoked(lease_id=1, reason=DropReason.STALE))
    assert node.of(CancelLease) == [CancelLease(lease_id=1)]
    assert node.of(ForgetLease) == [ForgetLease(lease_id=1)]
    assert node.sent(LeaseReturned) == []
    assert node(finished(1, 0)).of(SpoolRollout) == []


def test_a_failed_group_is_returned_with_the_reason() -> None:
    node = Node().ready()(lease(1), finished(1, 0), GroupFailed(lease_id=1, what="the prompt is too long"))
    (returned,) = node.sent(LeaseReturned)
    assert (returned.indices, returned.reason) == ((1,), "the prompt is too long")


def test_groups_that_all_fail_make_the_node_rest() -> None:
    node = Node().ready()
    for n in range(1, 4):
        node(lease(n), GroupFailed(lease_id=n, what="no"))
    assert node.sent(NodeStatus)[-1].capacity == 0
    assert node(Tick(), after_s=0.5).sent(NodeStatus) == []
    assert node(Tick(), after_s=0.5).sent(NodeStatus)[-1].capacity == 2 * WIDTH


def test_the_first_death_costs_nothing_but_a_restart() -> None:
    node = Node().ready()(lease(1), lease(2), EngineLost(what="killed"))
    assert node.of(StartEngine) == [StartEngine(after_s=0.0)]
    assert node.sent(NodeStatus)[-1].capacity == 0
    node(EngineReady(width=WIDTH))
    assert [e.request.lease_id for e in node.of(SubmitGroup)] == [1, 2]
    assert node.ever_sent(LeaseReturned) == []


def test_a_lease_that_kills_the_engine_is_returned_and_no_other() -> None:
    """Lease 2 kills whatever samples it."""
    node = Node().ready()
    done: set[int] = set()
    running: set[int] = set()

    def tell(event: Event) -> None:
        running.update(e.request.lease_id for e in node(event).of(SubmitGroup))

    for n in (1, 2, 3):
        tell(lease(n))
    deaths = 0
    while running:
        if 2 in running:
            deaths += 1
            running.clear()
            tell(EngineLost(what="crashed"))
            tell(EngineReady(width=WIDTH))
        else:
            lease_id = running.pop()
            done.add(lease_id)
            tell(finished(lease_id, 0))
            tell(finished(lease_id, 1))
    assert [r.lease_id for r in node.ever_sent(LeaseReturned)] == [2]
    assert (done, deaths) == ({1, 3}, 3)


def test_an_engine_that_does_not_start_gives_all_work_back_and_is_tried_again_later() -> None:
    node = Node().ready()(lease(1), EngineLost(what="killed"), EngineLost(what="no memory"))
    assert [r.lease_id for r in node.sent(LeaseReturned)] == [1]
    assert node.of(StartEngine) == [StartEngine(after_s=1.0)]
    node(EngineLost(what="no memory"))
    assert node.of(StartEngine) == [StartEngine(after_s=2.0)]


def test_an_engine_out_of_memory_starts_again_at_once_with_half_its_width() -> None:
    node = Node().ready()(lease(1))
    for width in (64, 32, 16, 8, 4, 2):
        node(EngineLost(what="full", cause="out_of_memory", width=width))
        assert node.of(StartEngine) == [StartEngine(after_s=0.0, max_width=width // 2)]
        node(EngineReady(width=width // 2))
        assert [e.request.lease_id for e in node.of(SubmitGroup)] == [1]
    assert node.ever_sent(LeaseReturned) == []


def test_so_does_one_that_cannot_even_load_its_model_until_width_is_not_what_it_lacks() -> None:
    node = Node()(welcome(), here(None), lease(1))
    widths = []
    for width in (0, 16, 8, 4, 2):
        node(EngineLost(what="full", cause="out_of_memory", width=width))
        widths += [start.max_width for start in node.of(StartEngine)]
    assert widths == [USUAL_WIDTH // 2, 8, 4, 2, 1]
    assert node.ever_sent(LeaseReturned) == []
    for after_s in (0.0, 1.0, 2.0):
        node(EngineLost(what="full", cause="out_of_memory", width=1))
        assert node.of(StartEngine) == [StartEngine(after_s=after_s, max_width=0)]
    assert [r.reason for r in node.ever_sent(LeaseReturned)] == ["the sampling engine does not start: full"]


def test_at_width_one_running_out_of_memory_is_a_death() -> None:
    node = Node().ready()(lease(1))
    full = EngineLost(what="full", cause="out_of_memory", width=1)
    waits = []
    for _ in range(3):
        waits += [start.after_s for start in node(full).of(StartEngine)]
        returned = node.sent(LeaseReturned)
        node(EngineReady(width=1))
    assert waits == [0.0, 1.0, 2.0]
    assert [r.reason for r in returned] == ["the sampling engine died 3 times on it: full"]


def test_an_engine_that_leaks_keeps_its_width() -> None:
    node = Node().ready()(lease(1, deadline_s=2 * STEADY_S))
    node(EngineLost(what="full", cause="out_of_memory", width=WIDTH), after_s=STEADY_S)
    assert node.of(StartEngine) == [StartEngine(after_s=0.0)]
    assert node.ever_sent(LeaseReturned) == []


def test_an_engine_that_makes_way_for_another_costs_nothing() -> None:
    node = Node().ready()(lease(1))
    for _ in range(10):
        node(EngineLost(what="a GPU is back", cause="stopped", width=WIDTH))
        assert node.of(StartEngine) == [StartEngine(after_s=0.0)]
        node(EngineReady(width=WIDTH))
        assert [e.request.lease_id for e in node.of(SubmitGroup)] == [1]
    assert node.ever_sent(LeaseReturned) == []


def test_no_more_is_asked_for_than_can_be_done_in_time() -> None:
    node = Node().ready()
    assert node.ever_sent(NodeStatus)[-1].capacity == 2 * WIDTH
    node(lease(1, deadline_s=1.2), finished(1, 0))  # 50 tokens/s, 2 each: 15 in half of the deadline.
    assert node.loop.status(node.now).capacity == 2 * WIDTH
    node(lease(2, deadline_s=0.12))
    assert node.sent(NodeStatus)[-1].capacity == 1
    node(EngineLost(what="killed"), EngineReady(width=WIDTH, tokens_per_s=200.0))
    assert node.sent(NodeStatus)[-1].capacity == 6


def test_work_returned_without_a_connection_is_returned_at_the_next_welcome() -> None:
    node = Node().ready()(lease(1), Disconnected(), GroupFailed(lease_id=1, what="no"))
    assert node.of(ForgetLease) == []
    node(welcome())
    assert [r.lease_id for r in node.sent(LeaseReturned)] == [1]
    assert ForgetLease(lease_id=1) in node.turn


def test_what_a_restarted_node_held_is_returned() -> None:
    node = Node(unfinished={4: (0, 3)})(welcome())
    (returned,) = node.sent(LeaseReturned)
    assert (returned.lease_id, returned.indices) == (4, (0, 3))


def test_a_full_disk_stops_the_intake_until_it_is_over() -> None:
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


def test_a_completion_of_another_is_scored_by_its_version_and_answered() -> None:
    """The version is on disk: it is loaded for this, and let go again."""
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


def test_who_cannot_score_or_leaves_declines() -> None:
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
    assert node(Tick(), after_s=4.9).sent(NodeStatus) == []
    assert len(node(Tick(), after_s=0.1).sent(NodeStatus)) == 1
    assert len(node(lease(1)).sent(NodeStatus)) == 1


def test_a_lease_past_its_deadline_is_returned_when_it_has_not_begun() -> None:
    node = Node().ready()
    node(
        PolicyPublished(policy_version=1, offer=offer(1)),
        lease(1, version=1, deadline_s=10.0),
        lease(2, deadline_s=10.0),
    )
    node(Tick(), after_s=10.5)
    assert [r.lease_id for r in node.sent(LeaseReturned)] == [1]
    node(Tick(), after_s=10.0)
    assert node.of(CancelLease) == [CancelLease(lease_id=2)]
    assert node.sent(LeaseReturned) == [] and node(Tick()).of(CancelLease) == []
    assert [r.lease_id for r in node(LeaseCancelled(lease_id=2)).sent(LeaseReturned)] == [2]


def test_more_work_than_any_node_holds_is_returned() -> None:
    node = Node().ready()
    for n in range(1, 6):
        node(lease(n, count=1_000))
    assert [r.lease_id for r in node.ever_sent(LeaseReturned)] == [5]


def test_the_base_is_fetched_again_after_a_failure() -> None:
    node = Node()(welcome(), FetchFailed(policy_version=None, what="nobody serves it"))
    assert node(Tick(), after_s=0.9).of(FetchArtefact) == []
    assert len(node(Tick(), after_s=0.1).of(FetchArtefact)) == 1


def test_draining_says_so_first_then_returns_then_waits_for_receipts_then_stops() -> None:
    node = Node().ready()(lease(1), finished(1, 0))
    rollout = node.of(SpoolRollout)[0].rollout
    node(DrainRequested(reason="enough"))
    messages = [e.message for e in node.turn if isinstance(e, Send)]
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
    assert isinstance(node.turn[-2], Send) and isinstance(node.turn[-2].message, Goodbye)
    assert node.turn[-1] == Stop()
    assert node(Tick()).turn == ()


PAUSED = Holding(holds=(Hold(HoldReason.PAUSED, "Paused by you."),), keep_memory_s=60.0)
GAME = Holding(holds=(Hold(HoldReason.FULL_SCREEN, "A game.", frees_memory=True),), keep_memory_s=60.0)
FREE = Holding(holds=(), keep_memory_s=60.0)


def test_a_held_node_says_so_gives_back_all_that_was_drawn_and_then_stops_its_engine() -> None:
    node = Node().ready()(lease(1), RolloutsDrawn(parts=(drawn(1, 0, 0, 5),)), PAUSED)
    (status,) = node.sent(NodeStatus)
    assert (status.activity, status.capacity, status.checks) == ("paused", 0, 0)
    assert node.of(CancelLease) == [CancelLease(lease_id=1)] and node.of(SuspendEngine) == []
    assert node.loop.held_back_by(0.0) == ("the machine is its owner's",)
    node(RolloutsDrawn(parts=(drawn(1, 0, 1, 6, 7),)))
    assert shown(node.sent(RolloutParts)) == [(1, 0, 1, [6, 7])]
    node(LeaseCancelled(lease_id=1))
    (returned,) = node.sent(LeaseReturned)
    assert (returned.indices, returned.reason) == ((0, 1), "the machine's owner needs it")
    assert node.of(SuspendEngine) == [SuspendEngine()]
    assert node(lease(2)).sent(LeaseReturned)[0].reason == "the machine is its owner's"


def test_an_engine_that_does_not_answer_is_stopped_where_it_is() -> None:
    node = Node().ready()(lease(1), PAUSED)
    assert node(Tick(), after_s=YIELD_S / 2).of(SuspendEngine) == []
    node(Tick(), after_s=YIELD_S / 2)
    assert len(node.sent(LeaseReturned)) == 1 and node.of(SuspendEngine) == [SuspendEngine()]


def test_a_stopped_engine_is_told_nothing_and_goes_on_at_once() -> None:
    node = Node().ready()(PAUSED)
    assert node.of(SuspendEngine) == [SuspendEngine()]
    node(PolicyPublished(policy_version=1, offer=real_offer(1)))
    assert node.of(FetchArtefact), "what is new is fetched all the same"
    assert node(here(1)).of(AddPolicy) == []
    node(FREE)
    assert [type(effect) for effect in node.turn][:2] == [ResumeEngine, AddPolicy]
    assert node.sent(NodeStatus)[-1].capacity == 2 * WIDTH
    assert node(lease(1, version=1)).of(SubmitGroup)


def drawn_of_one(lease_id: int) -> RolloutsDrawn:
    return RolloutsDrawn(parts=(drawn(lease_id, 0, 0, 5, 6, version=0),))


def test_an_engine_with_old_settings_tells_all_ends_and_the_next_one_goes_on_with_the_same_leases() -> None:
    node = Node().ready()(lease(1), EngineOutdated())
    assert node.of(CancelLease) == [CancelLease(lease_id=1)] and node.of(EndEngine) == []
    assert node.loop.held_back_by(node.now)[0] == "the engine is not up"
    assert node(lease(2)).of(SubmitGroup) == [], "what is leased meanwhile waits for the next engine"
    node(drawn_of_one(1))
    node(LeaseCancelled(lease_id=1))
    assert node.of(EndEngine) == [EndEngine()] and node.of(SubmitGroup) == []
    node(EngineLost(what="ended", cause="stopped"))
    assert node.of(StartEngine) == [StartEngine(after_s=0.0)]
    node(EngineReady(width=WIDTH))
    again = {effect.request.lease_id: effect.request for effect in node.of(SubmitGroup)}
    assert again.keys() == {1, 2} and [len(one.ids) for one in again[1].prefixes if one.index == 0] == [2]
    assert node.ever_sent(LeaseReturned) == []


def test_an_engine_that_is_not_up_or_does_not_answer_or_is_stopped_is_replaced_all_the_same() -> None:
    node = Node()(welcome(), here(None), EngineOutdated())
    assert node.of(EndEngine) == [EndEngine()]
    node = Node().ready()(lease(1), EngineOutdated())
    assert node(Tick(), after_s=LAST_WORDS_S / 2).of(EndEngine) == []
    assert node(Tick(), after_s=LAST_WORDS_S / 2).of(EndEngine) == [EndEngine()]
    assert Node().ready()(PAUSED, EngineOutdated()).of(EndEngine) == [EndEngine()]
    node = Node().ready()(GAME, EngineLost(what="ended", cause="stopped"), EngineOutdated())
    assert node.of(EndEngine) == [] and node(FREE).of(StartEngine) == [StartEngine(after_s=0.0)]


def test_a_game_gets_the_engine_s_memory_at_once_and_a_pause_after_a_while() -> None:
    node = Node().ready()(lease(1), GAME, LeaseCancelled(lease_id=1))
    assert node.of(EndEngine) == [EndEngine()] and node.of(SuspendEngine) == []
    assert node(EngineLost(what="it was stopped", cause="stopped")).of(StartEngine) == []
    assert node(FREE).of(StartEngine) == [StartEngine(after_s=0.0)]
    node(EngineReady(width=WIDTH), PAUSED)
    assert node(Tick(), after_s=PAUSED.keep_memory_s).of(EndEngine) == [EndEngine()]
    assert node(Tick(), after_s=PAUSED.keep_memory_s).of(EndEngine) == [], "once"
    assert node(FREE).of(StartEngine) == [], "its end is waited for"
    assert node(EngineLost(what="it was stopped", cause="stopped")).of(StartEngine) == [StartEngine(after_s=0.0)]


def test_an_engine_that_is_not_up_yet_does_not_start_beside_its_owner() -> None:
    node = Node()(PAUSED, welcome(), here(None))
    assert node.of(StartEngine) == []
    assert node(FREE).of(StartEngine) == [StartEngine(after_s=0.0)]
    assert node(PAUSED).of(EndEngine) == [EndEngine()], "to load a model costs the owner as much as to sample"


def test_finishing_ends_what_is_held_and_takes_nothing_new() -> None:
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
    assert node(Tick(), after_s=DRAIN_S).of(Stop) == [Stop()]


def test_draining_without_a_connection_is_done_at_once() -> None:
    assert Node(unacked=["9-9"]).ready()(Disconnected(), DrainRequested(reason="enough")).of(Stop) == [Stop()]


def drawn(lease_id: int, index: int, start: int, *ids: int, version: int = 0) -> DrawnPart:
    logprobs = np.full(len(ids), -0.5, np.float32)
    return DrawnPart(
        lease_id=lease_id,
        index=index,
        policy_version=version,
        start=start,
        ids=np.array(ids, np.int32),
        logprobs=logprobs,
    )


def shown(messages: list[RolloutParts]) -> list[tuple[int, int, int, list[int]]]:
    return [(one.lease_id, one.index, one.start, one.ids.tolist()) for message in messages for one in message.parts]


def continued(lease_id: int, index: int, *ids: int) -> Lease:
    given = LeasedPrefix(index=index, ids=np.array(ids, np.int32), logprobs=np.full(len(ids), -0.5, np.float32))
    return lease(lease_id).model_copy(update={"prefixes": (given,)})


def test_what_is_drawn_is_sent_at_once_and_again_after_a_reconnect() -> None:
    node = Node().ready()(lease(1), RolloutsDrawn(parts=(drawn(1, 0, 0, 7, 8), drawn(1, 1, 0, 9))))
    assert shown(node.sent(RolloutParts)) == [(1, 0, 0, [7, 8]), (1, 1, 0, [9])]
    node(RolloutsDrawn(parts=(drawn(1, 1, 1, 5),)))
    assert shown(node.sent(RolloutParts)) == [(1, 1, 1, [5])]
    node(Disconnected(), RolloutsDrawn(parts=(drawn(1, 0, 2, 6),)))
    assert node.sent(RolloutParts) == []
    node(finished(1, 1), welcome())
    assert shown(node.sent(RolloutParts)) == [(1, 0, 0, [7, 8, 6])]


def test_a_prefix_goes_to_the_engine_and_the_rollout_says_how_much_was_given() -> None:
    node = Node().ready()(continued(1, 1, 7, 8))
    (submitted,) = node.of(SubmitGroup)
    assert [(one.index, one.ids.tolist()) for one in submitted.request.prefixes] == [(1, [7, 8])]
    node(RolloutsDrawn(parts=(drawn(1, 1, 2, 9),)))
    assert shown(node.sent(RolloutParts)) == [(1, 1, 2, [9])]
    assert [spool.rollout.num_given for spool in node(finished(1, 1)).of(SpoolRollout)] == [2]
    assert [spool.rollout.num_given for spool in node(finished(1, 0)).of(SpoolRollout)] == [0]


def test_the_engine_after_one_that_died_goes_on_where_it_was() -> None:
    node = Node().ready()(continued(1, 1, 7), RolloutsDrawn(parts=(drawn(1, 0, 0, 5), drawn(1, 1, 1, 8))))
    node(EngineLost(what="killed"), EngineReady(width=WIDTH))
    prefixes = {one.index: one.ids.tolist() for one in node.of(SubmitGroup)[0].request.prefixes}
    assert prefixes == {0: [5], 1: [7, 8]}
    node(RolloutsDrawn(parts=(drawn(1, 0, 1, 6),)))
    assert shown(node.sent(RolloutParts)) == [(1, 0, 1, [6])]
    assert node(finished(1, 1)).of(SpoolRollout)[0].rollout.num_given == 1, "what the hub gave"


def test_all_that_was_drawn_is_sent_before_the_lease_goes_back() -> None:
    node = Node().ready()(lease(1, count=3), lease(2), RolloutsDrawn(parts=(drawn(1, 0, 0, 5),)))
    node(DrainRequested(reason="enough"), RolloutsDrawn(parts=(drawn(1, 0, 1, 6), drawn(2, 0, 0, 7))))
    node(finished(1, 2), LeaseCancelled(lease_id=1), LeaseCancelled(lease_id=2))
    said = [
        e.message for e in node.wanted if isinstance(e, Send) and isinstance(e.message, RolloutParts | LeaseReturned)
    ]
    assert [type(one) for one in said] == [RolloutParts, RolloutParts, LeaseReturned, LeaseReturned]
    assert shown(node.ever_sent(RolloutParts)) == [(1, 0, 0, [5]), (1, 0, 1, [6]), (2, 0, 0, [7])]
    assert [one.indices for one in node.ever_sent(LeaseReturned)] == [(0, 1), (0, 1)], "what has finished is kept"


def test_an_engine_that_does_not_answer_or_ends_holds_no_lease_back() -> None:
    node = Node().ready()(lease(1), DrainRequested(reason="enough"))
    assert node(Tick(), after_s=LAST_WORDS_S).sent(LeaseReturned)[0].lease_id == 1
    node = Node().ready()(lease(1), DrainRequested(reason="enough"), EngineLost(what="killed"))
    assert [one.reason for one in node.sent(LeaseReturned)] == ["enough"]
    assert node.of(CancelLease) == [] and node(LeaseCancelled(lease_id=1)).sent(LeaseReturned) == []


def test_a_lease_that_is_revoked_or_fails_while_it_leaves_ends_once() -> None:
    node = Node().ready()(lease(1), lease(2), DrainRequested(reason="enough"))
    node(LeaseRevoked(lease_id=1, reason=DropReason.STALE), GroupFailed(lease_id=2, what="no"))
    node(LeaseCancelled(lease_id=1), LeaseCancelled(lease_id=2))
    assert [(one.lease_id, one.reason) for one in node.ever_sent(LeaseReturned)] == [(2, "no")]
    assert sum(isinstance(effect, CancelLease) for effect in node.wanted) == 2


def interruptible(lease_id: int, *, version: int = 0, count: int = 2, max_tokens: int = 1_000) -> Lease:
    update = {"on_new_version": "interrupt", "max_tokens": max_tokens}
    return lease(lease_id, version=version, count=count).model_copy(update=update)


def ended(lease_id: int, index: int, version: int, *, tokens: int) -> RolloutFinished:
    """Completion 0, 1, 2, ... to its `tokens`."""
    rollout = replace(
        finished(lease_id, index, version).rollout,
        completion_ids=np.arange(tokens, dtype=np.int32),
        behavior_logprobs=np.full(tokens, -0.5, np.float32),
    )
    return RolloutFinished(rollout=rollout, tokens_per_s=50.0)


def prepared_anew(node: Node, version: int) -> Node:
    """A newer version is here, and the engine can draw by it."""
    news = PolicyPublished(policy_version=version, offer=offer(version))
    return node(news, here(version), PolicyPrepared(policy_version=version))


def spans(rollout: Rollout) -> list[tuple[int, int]]:
    return [(span.policy_version, span.num_tokens) for span in rollout.versions]


def test_a_completion_goes_on_by_a_newer_version_where_it_was() -> None:
    node = Node().ready()(interruptible(1), RolloutsDrawn(parts=(drawn(1, 0, 0, 0, 1), drawn(1, 1, 0, 0))))
    prepared_anew(node, 1)
    assert node.of(CancelLease) == [CancelLease(lease_id=1)] and node.of(SubmitGroup) == []
    node(RolloutsDrawn(parts=(drawn(1, 0, 2, 2),)), Tick())
    assert node.of(CancelLease) == [], "once"
    node(LeaseCancelled(lease_id=1))
    (submitted,) = node.of(SubmitGroup)
    assert submitted.request.policy_version == 1
    assert {one.index: one.ids.tolist() for one in submitted.request.prefixes} == {0: [0, 1, 2], 1: [0]}
    node(RolloutsDrawn(parts=(drawn(1, 0, 3, 3, version=1),)))
    assert [(part.start, part.policy_version) for part in node.sent(RolloutParts)[0].parts] == [(3, 1)]
    (spool,) = node(ended(1, 0, 1, tokens=6)).of(SpoolRollout)
    rollout = spool.rollout
    assert (rollout.policy_version_start, rollout.policy_version_end, rollout.num_given) == (0, 1, 0)
    assert spans(rollout) == [(0, 3), (1, 3)]
    assert DropPolicy(policy_version=0) not in node.wanted or node.loop.held_rollouts == 1


def test_a_lease_that_names_its_version_is_drawn_to_its_end_by_it() -> None:
    node = Node().ready()(lease(1), interruptible(2))
    prepared_anew(node, 1)
    assert node.of(CancelLease) == [CancelLease(lease_id=2)]
    (spool,) = node(finished(1, 0)).of(SpoolRollout)
    assert (spool.rollout.policy_version_end, spool.rollout.versions) == (0, ())


def test_what_ends_soon_and_what_is_prepared_is_not_broken_into() -> None:
    node = Node().ready()(lease(1, count=1), interruptible(2, max_tokens=8), finished(1, 0))
    prepared_anew(node, 1)
    assert node.of(CancelLease) == [], "8 tokens at 50 a second"
    node = Node().ready()(interruptible(2), PolicyPublished(policy_version=1, offer=offer(1)), here(1))
    assert node.of(CancelLease) == [], "the engine does not have it yet"
    assert node(PolicyPrepared(policy_version=1)).of(CancelLease) == [CancelLease(lease_id=2)]


def test_what_has_not_begun_begins_by_the_newest() -> None:
    node = Node()(welcome(1), here(None), interruptible(1, version=1), here(1))
    node(PolicyPublished(policy_version=2, offer=offer(2)), here(2), EngineReady(width=WIDTH))
    assert [one.request.policy_version for one in node.of(SubmitGroup)] == [2]
    (spool,) = node(ended(1, 0, 2, tokens=2)).of(SpoolRollout)
    assert (spool.rollout.policy_version_start, spool.rollout.policy_version_end) == (2, 2)


def test_an_engine_that_dies_between_two_versions_costs_what_it_had_not_told() -> None:
    node = Node().ready()(interruptible(1, count=1), RolloutsDrawn(parts=(drawn(1, 0, 0, 0, 1),)))
    prepared_anew(node, 1)
    node(EngineLost(what="killed"), EngineReady(width=WIDTH))
    (submitted,) = node.of(SubmitGroup)
    assert (submitted.request.policy_version, [len(one.ids) for one in submitted.request.prefixes]) == (1, [2])
    (spool,) = node(ended(1, 0, 1, tokens=3)).of(SpoolRollout)
    assert spans(spool.rollout) == [(0, 2), (1, 1)]


def test_a_lease_that_is_revoked_or_goes_back_between_two_versions_ends_once() -> None:
    node = prepared_anew(Node().ready()(interruptible(1), interruptible(2), interruptible(3)), 1)
    node(LeaseRevoked(lease_id=1, reason=DropReason.STALE), GroupFailed(lease_id=2, what="no"))
    node(DrainRequested(reason="enough"), LeaseCancelled(lease_id=1), LeaseCancelled(lease_id=2))
    node(LeaseCancelled(lease_id=3))
    assert [one.lease_id for one in node.ever_sent(LeaseReturned)] == [2, 3]
    assert sum(isinstance(effect, SubmitGroup) for effect in node.wanted) == 3


def test_a_version_of_other_content_takes_what_was_drawn_by_it_along() -> None:
    """As after the hub was restored from a backup: nothing may be gone on with that another policy drew."""
    node = Node()(welcome(1).model_copy(update={"policy": real_offer(1)}), here(None), here(1))
    node(EngineReady(width=WIDTH), lease(1, version=1), lease(2, version=0))
    node(RolloutsDrawn(parts=(drawn(1, 0, 0, 7, version=1), drawn(2, 0, 0, 8))), Disconnected())
    node(welcome(1).model_copy(update={"policy": real_offer(1, "b")}))
    assert [(one.lease_id, one.reason) for one in node.sent(LeaseReturned)] == [
        (1, "policy version 1 has been replaced")
    ]
    assert shown(node.sent(RolloutParts)) == [(2, 0, 0, [8])]
    engine = [effect for effect in node.turn if isinstance(effect, CancelLease | DropPolicy)]
    assert engine == [CancelLease(lease_id=1), DropPolicy(policy_version=1)], "no group is left of what is dropped"
    node(here(1), lease(3, version=1))
    assert [one.request.lease_id for one in node.of(SubmitGroup)] == [3]


STEPS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(0, 3)), max_size=60)


class World:
    """Answers a work loop's effects at random moments, and keeps account of every leased index."""

    def __init__(self) -> None:
        self.node = Node()
        self.leased: dict[int, int] = {}
        self.returned: set[str] = set()
        self.revoked: set[int] = set()
        self.spooled: set[str] = set()
        self.sent_before_spooled: set[str] = set()
        self.running: dict[int, set[int]] = {}
        self.versions: dict[int, int] = {}
        """By lease, the version that it runs by; before that, the one that it names."""
        self.may_move: set[int] = set()
        self.loaded: set[int] = set()
        self.engine_exists = self.engine_up = self.engine_is_still = self.engine_ends = False
        self.engine_is_outdated = False
        self.holds: tuple[Hold, ...] = ()
        self.unspooled: list[Rollout] = []
        self.fetching: dict[int | None, ArtefactOffer] = {}
        self.on_disk: set[int | None] = {None}
        """None stands for what a keyframe needs, as well as for the base."""
        self.published = 0
        self.drawn: dict[tuple[int, int], list[int]] = {}
        """The version of each token that the engine has drawn of what it holds; how many of them it has told."""
        self.told: dict[tuple[int, int], int] = {}
        self.known: dict[tuple[int, int], list[int]] = {}
        """The version of each token that the node was given or told of."""
        self.hub_has: dict[tuple[int, int], int] = {}
        """Tokens of unfinished rollouts; forgotten with each connection."""
        self.cancelling: list[int] = []

    @property
    def engine_works(self) -> bool:
        return self.engine_up and not self.engine_is_still and not self.engine_ends

    def news(self) -> RolloutsDrawn:
        news = [(name, self.told[name], by) for name, by in self.drawn.items() if len(by) > self.told[name]]
        self.told |= {name: len(by) for name, _, by in news}
        self.known |= {name: list(by) for name, _, by in news}
        return RolloutsDrawn(
            parts=tuple(drawn(*name, start, *range(start, len(by)), version=by[-1]) for name, start, by in news)
        )

    def do(self, event: Event) -> None:
        self.node(event, after_s=0.01)
        for effect in self.node.turn:
            self.take(effect)
        for effect in self.node.of(FetchArtefact):
            assert effect.offer.delta_parent in self.on_disk | self.fetching.keys(), "a delta without its parent"

    def take(self, effect: Effect) -> None:
        match effect:
            case Send(message=LeaseReturned() as returned):
                names = {rollout_id(returned.lease_id, index) for index in returned.indices}
                assert not names & self.returned, "returned twice"
                self.returned |= names
            case Send(message=RolloutParts(parts=parts)):
                for part in parts:
                    name = part.lease_id, part.index
                    assert part.start == self.hub_has.get(name, 0), "sent twice, or not in order"
                    self.hub_has[name] = part.start + len(part.ids)
                    assert part.ids.tolist() == [*range(part.start, self.hub_has[name])]
                    assert {*self.known[name][part.start : self.hub_has[name]]} == {part.policy_version}
            case Send(message=Rollout() as rollout):
                assert rollout.rollout_id in self.spooled, "sent before it was spooled"
            case SpoolRollout(rollout=rollout):
                by = self.known[rollout.lease_id, rollout.index]
                assert (rollout.policy_version_start, rollout.policy_version_end) == (by[0], by[-1])
                expected = [(version, by.count(version)) for version in sorted(set(by))]
                assert spans(rollout) == (expected if len(expected) > 1 else [])
                self.unspooled.append(rollout)
            case StartEngine():
                assert not self.engine_exists and not self.holds
                self.engine_exists = True
            case SuspendEngine():
                assert self.engine_up and not self.engine_is_still and not self.engine_ends and self.holds
                self.engine_is_still = True
            case ResumeEngine():
                assert self.engine_is_still and not self.holds
                self.engine_is_still = False
            case EndEngine():
                assert self.engine_exists and not self.engine_ends and (self.holds or self.engine_is_outdated)
                self.engine_ends = True
            case AddPolicy(policy_version=version):
                assert self.engine_works
                self.loaded.add(version)
            case SubmitGroup(request=request):
                assert self.engine_works and request.policy_version in self.loaded
                assert request.lease_id not in self.running, "submitted twice"
                self.running[request.lease_id] = set(request.indices)
                before, self.versions[request.lease_id] = self.versions[request.lease_id], request.policy_version
                assert request.policy_version >= before
                assert request.policy_version == before or request.lease_id in self.may_move
                given = {one.index: len(one.ids) for one in request.prefixes}
                for index in request.indices:
                    name = request.lease_id, index
                    assert given.get(index, 0) == len(self.known[name]), "nothing that was told is drawn again"
                    self.drawn[name], self.told[name] = list(self.known[name]), len(self.known[name])
            case CancelLease(lease_id=lease_id):
                self.running.pop(lease_id, None)  # It may have been told before, to move on.
                self.cancelling.append(lease_id)
            case FetchArtefact(policy_version=version, offer=one):
                assert version not in self.fetching, "fetched twice at once"
                self.fetching[version] = one
            case AbandonFetch(policy_version=version):
                del self.fetching[version]
            case RemoveArtefact(policy_version=version):
                self.on_disk.remove(version)
                assert version not in self.loaded
                assert version not in [one.delta_parent for one in self.fetching.values()], "still needed"
            case DropPolicy(policy_version=version):
                self.loaded.remove(version)
            case _:
                pass

    def step(self, kind: int, a: int, b: int) -> None:
        lease_ids = sorted(self.running)
        chosen = lease_ids[a % len(lease_ids)] if lease_ids else None
        if kind == 0:  # From a hub that has forgotten what the version was, or not.
            news = welcome(self.published)
            self.hub_has = {}
            same = news.model_copy(update={"policy": news.policy and real_offer(self.published)})
            self.do(same if b else news)
        elif kind == 1:
            self.do(Disconnected())
        elif kind == 2 and a not in self.leased:
            version = max(0, self.published - b)
            self.leased[a], self.versions[a] = b + 1, version
            self.hub_has[a, 0] = b
            given = continued(a, 0, *range(b)).prefixes if b else ()
            self.known |= {(a, index): [version] * b if index == 0 else [] for index in range(b + 1)}
            leased = interruptible(a, version=version, count=b + 1)
            if a % 2:
                self.may_move.add(a)
            else:
                leased = leased.model_copy(update={"on_new_version": "finish"})
            self.do(leased.model_copy(update={"prefixes": given}))
        elif kind == 3 and a in self.leased:
            self.revoked.add(a)
            self.do(LeaseRevoked(lease_id=a, reason=DropReason.STALE))
        elif kind in (4, 5, 6) and chosen is not None:
            index = self.running[chosen].pop()
            by = self.drawn.pop((chosen, index))
            self.known[chosen, index] = [*by, self.versions[chosen]]
            if not self.running[chosen]:
                del self.running[chosen]
            self.do(ended(chosen, index, self.versions[chosen], tokens=len(by) + 1))
        elif kind == 7 and chosen is not None:
            del self.running[chosen]
            self.do(GroupFailed(lease_id=chosen, what="no"))
        elif kind == 8 and (self.engine_up or self.engine_ends):
            self.engine_up, self.running, self.loaded = False, {}, set()
            self.engine_exists = self.engine_is_still = self.engine_ends = self.engine_is_outdated = False
            self.cancelling, self.drawn = [], {}
            cause: LossCause = ("died", "out_of_memory", "stopped")[a % 3]  # type: ignore[assignment]
            self.do(EngineLost(what="died", cause=cause, width=b))
        elif kind == 9 and self.engine_exists and not self.engine_up:
            self.engine_up = True
            self.do(EngineReady(width=WIDTH))
        elif kind == 10 and self.unspooled:
            batch, self.unspooled = tuple(self.unspooled), []
            self.spooled |= {rollout.rollout_id for rollout in batch}
            self.do(Spooled(rollouts=batch))
        elif kind == 11 and self.fetching:
            version = sorted(self.fetching, key=str)[a % len(self.fetching)]
            del self.fetching[version]
            if b:
                self.on_disk.add(version)
            unreadable = version is not None and a % 2 == 0
            self.do(here(version) if b else FetchFailed(policy_version=version, what="no", unreadable=unreadable))
        elif kind == 12:
            self.published += 1
            parent = self.published - 1 - b if a % 2 and b < self.published - 1 else None
            news = real_offer(self.published, parent=parent)
            self.do(PolicyPublished(policy_version=self.published, offer=news))
        elif kind == 14:
            running = {(lease_id, index) for lease_id, indices in self.running.items() for index in indices}
            for name, by in self.drawn.items():
                by += [self.versions[name[0]]] * a if name in running else []
        elif kind == 15:
            self.do(self.news())
        elif kind == 19:
            held = Hold(HoldReason.PAUSED, "Paused by you."), Hold(HoldReason.FULL_SCREEN, "A game.", frees_memory=True)
            self.holds = ((), held[:1], held[1:])[a % 3]
            self.do(Holding(holds=self.holds, keep_memory_s=0.01 * b))
        elif kind == 20:
            self.engine_is_outdated = self.engine_exists
            self.do(EngineOutdated())
        elif kind == 16 and self.cancelling and not self.engine_is_still:
            lease_id = self.cancelling.pop(0)
            self.do(self.news())
            self.drawn = {name: by for name, by in self.drawn.items() if name[0] != lease_id}
            self.do(LeaseCancelled(lease_id=lease_id))
        elif kind == 18 and self.loaded and self.engine_up:
            self.do(PolicyPrepared(policy_version=sorted(self.loaded)[a % len(self.loaded)]))
        elif kind == 13 and self.published:
            version = max(1, self.published - b)
            self.do(PolicyPublished(policy_version=version, offer=real_offer(version)))
        else:
            self.do(Tick(progress=dict.fromkeys(self.fetching, (a, a + b))))


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_every_leased_index_ends_once(steps: list[tuple[int, int, int]]) -> None:
    world = World()
    world.do(welcome())
    for kind, a, b in steps:
        world.step(kind, a, b)
    world.step(0, 0, 0)  # Reconnected, so that what is to be said is said.
    world.do(DrainRequested(reason="the end"))
    world.node.now += LAST_WORDS_S
    world.do(Tick())
    spooled = world.spooled | {rollout.rollout_id for rollout in world.unspooled}
    assert not spooled & world.returned
    for lease_id, count in world.leased.items():
        names = {rollout_id(lease_id, index) for index in range(count)}
        assert lease_id in world.revoked or names <= spooled | world.returned
