"""A node's work loop whose engine ends, does not answer, gets new settings, or must pause for the owner."""

from echo_node.core.effects import (
    AddPolicy,
    CancelLease,
    EndEngine,
    FetchArtefact,
    LimitDuty,
    ResumeEngine,
    StartEngine,
    SubmitGroup,
    SuspendEngine,
)
from echo_node.core.events import (
    Disconnected,
    EngineLost,
    EngineOutdated,
    EngineReady,
    Holding,
    LeaseCancelled,
    NodeTick,
    RolloutsDrawn,
)
from echo_node.core.manners import Hold, HoldReason
from echo_node.core.work import LAST_WORDS_S
from echo_node.core.yielding import YIELD_S
from echo_shared.wire.messages import LeaseReturned, NodeStatus, PolicyPublished, RolloutParts
from tests.echo_node.core.loop_parts import WIDTH, Node, drawn, here, lease, shown, welcome
from tests.echo_node.core.test_policies import offer as real_offer


def test_an_engine_without_weights_starts_again_once_the_base_has_come_again() -> None:
    node = Node().ready()(lease(1), EngineLost(what="no weights", cause="no_weights"))
    assert node.of(StartEngine) == [] and [e.policy_version for e in node.of(FetchArtefact)] == [None]
    assert node.loop.engine_problems == {"": None}
    assert node(NodeTick(), after_s=1.0).of(StartEngine) == []
    node(here(None))
    assert node.of(StartEngine) == [StartEngine(after_s=0.0)]
    node(EngineReady(width=WIDTH))
    assert [e.request.lease_id for e in node.of(SubmitGroup)] == [1]
    assert node.ever_sent(LeaseReturned) == []


def test_an_engine_out_of_memory_starts_again_at_once_with_half_its_width() -> None:
    node = Node().ready()(lease(1))
    for width in (64, 32, 16, 8, 4, 2):
        node(EngineLost(what="full", cause="out_of_memory", width=width))
        assert node.of(StartEngine) == [StartEngine(after_s=0.0, max_width=width // 2)]
        node(EngineReady(width=width // 2))
        assert [e.request.lease_id for e in node.of(SubmitGroup)] == [1]
    assert node.ever_sent(LeaseReturned) == []


PAUSED = Holding(holds=(Hold(HoldReason.PAUSED, "Paused by you."),), keep_memory_s=60.0)
GAME = Holding(holds=(Hold(HoldReason.FULL_SCREEN, "A game.", frees_memory=True),), keep_memory_s=60.0)
FREE = Holding(holds=(), keep_memory_s=60.0)


def test_a_held_node_returns_its_sampled_tokens_and_stops_its_engine() -> None:
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


def test_an_engine_that_does_not_answer_is_suspended() -> None:
    node = Node().ready()(lease(1), PAUSED)
    assert node(NodeTick(), after_s=YIELD_S / 2).of(SuspendEngine) == []
    node(NodeTick(), after_s=YIELD_S / 2)
    assert len(node.sent(LeaseReturned)) == 1 and node.of(SuspendEngine) == [SuspendEngine()]


def test_a_stopped_engine_is_told_nothing_and_continues_at_once() -> None:
    node = Node().ready()(PAUSED)
    assert node.of(SuspendEngine) == [SuspendEngine()]
    node(PolicyPublished(policy_version=1, offer=real_offer(1)))
    assert node.of(FetchArtefact), "a new version is fetched all the same"
    assert node(here(1)).of(AddPolicy) == []
    node(FREE)
    assert [type(effect) for effect in node.turn][:2] == [ResumeEngine, AddPolicy]
    assert node.sent(NodeStatus)[-1].capacity == 2 * WIDTH
    assert node(lease(1, version=1)).of(SubmitGroup)


def drawn_of_one(lease_id: int) -> RolloutsDrawn:
    return RolloutsDrawn(parts=(drawn(lease_id, 0, 0, 5, 6, version=0),))


def test_an_engine_with_new_settings_continues_the_old_ones_leases() -> None:
    node = Node().ready()(lease(1), EngineOutdated())
    assert node.of(CancelLease) == [CancelLease(lease_id=1)] and node.of(EndEngine) == []
    assert node.loop.held_back_by(node.now)[0] == "the engine is not up"
    assert node(lease(2)).of(SubmitGroup) == [], "a lease that arrives meanwhile waits for the next engine"
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
    assert node(NodeTick(), after_s=LAST_WORDS_S / 2).of(EndEngine) == []
    assert node(NodeTick(), after_s=LAST_WORDS_S / 2).of(EndEngine) == [EndEngine()]
    assert Node().ready()(PAUSED, EngineOutdated()).of(EndEngine) == [EndEngine()]
    node = Node().ready()(GAME, EngineLost(what="ended", cause="stopped"), EngineOutdated())
    assert node.of(EndEngine) == [] and node(FREE).of(StartEngine) == [StartEngine(after_s=0.0)]


def test_a_game_gets_the_engine_s_memory_at_once_and_a_pause_after_a_while() -> None:
    node = Node().ready()(lease(1), GAME, LeaseCancelled(lease_id=1))
    assert node.of(EndEngine) == [EndEngine()] and node.of(SuspendEngine) == []
    assert node(EngineLost(what="it was stopped", cause="stopped")).of(StartEngine) == []
    assert node(FREE).of(StartEngine) == [StartEngine(after_s=0.0)]
    node(EngineReady(width=WIDTH), PAUSED)
    assert node(NodeTick(), after_s=PAUSED.keep_memory_s).of(EndEngine) == [EndEngine()]
    assert node(NodeTick(), after_s=PAUSED.keep_memory_s).of(EndEngine) == [], "once"
    assert node(FREE).of(StartEngine) == [], "its end is awaited"
    assert node(EngineLost(what="it was stopped", cause="stopped")).of(StartEngine) == [StartEngine(after_s=0.0)]


def test_a_node_rests_from_its_engines_suspension_until_its_owner_is_gone() -> None:
    node = Node().ready()(lease(1))
    assert not node.loop.rests
    assert not node(PAUSED).loop.rests, "its engine has not reported all tokens"
    assert node(LeaseCancelled(lease_id=1)).loop.rests
    assert not node(FREE).loop.rests
    assert not node(GAME).loop.rests, "its engine has to end"
    assert node(EngineLost(what="it was stopped", cause="stopped")).loop.rests


def test_an_engine_does_not_start_while_the_owner_is_active() -> None:
    node = Node()(PAUSED, welcome(), here(None))
    assert node.of(StartEngine) == []
    assert node(FREE).of(StartEngine) == [StartEngine(after_s=0.0)]
    assert node(PAUSED).of(EndEngine) == [EndEngine()], "loading a model costs the owner as much as sampling"


def quarter(share: float = 0.25, *holds: Hold) -> Holding:
    return Holding(holds=holds, keep_memory_s=60.0, shares={"": share})


def test_an_engine_is_told_its_share_once_and_before_any_work() -> None:
    node = Node()(welcome(), here(None), quarter())
    assert node.of(LimitDuty) == [], "no engine is up"
    node(lease(1), EngineReady(width=WIDTH, tokens_per_s=400.0))
    effects = [type(effect) for effect in node.turn]
    assert node.of(LimitDuty) == [LimitDuty(share=0.25)]
    assert effects.index(LimitDuty) < effects.index(SubmitGroup)
    assert node.sent(NodeStatus)[-1].tokens_per_s == 100.0
    assert node(NodeTick()).of(LimitDuty) == node(quarter()).of(LimitDuty) == []
    assert node(quarter(1.0)).of(LimitDuty) == [LimitDuty(share=1.0)]
    assert node.loop.status(node.now).tokens_per_s == 100.0, "a higher speed must be measured first"
    node(quarter(0.5))
    assert node.loop.status(node.now).tokens_per_s == 50.0
    assert node.ever_sent(LeaseReturned) == [], "a share pauses nothing"


def test_a_new_engine_is_told_its_share_again() -> None:
    node = Node().ready()(quarter(), EngineLost(what="died", cause="died"))
    node(EngineReady(width=WIDTH))
    assert node.of(LimitDuty) == [LimitDuty(share=0.25)]


def test_a_stopped_engine_is_told_its_share_when_it_resumes() -> None:
    paused = Hold(HoldReason.PAUSED, "Paused by you.")
    node = Node().ready()(quarter(1.0, paused))
    assert node.of(SuspendEngine) == [SuspendEngine()]
    assert node(quarter(0.5, paused)).of(LimitDuty) == node(quarter(0.25, paused)).of(LimitDuty) == []
    node(quarter(0.25))
    assert [type(effect) for effect in node.turn][:2] == [ResumeEngine, LimitDuty]


def test_a_node_works_while_it_samples_or_gets_ready() -> None:
    node = Node()
    assert not node.loop.works, "no hub is reached"
    assert node(welcome()).loop.works
    assert node(here(None)).loop.works
    assert not node(Disconnected()).loop.works
    node(welcome(), EngineReady(width=WIDTH))
    assert not node.loop.works
    assert node(lease(1)).loop.works
    assert node(Disconnected()).loop.works
    assert not node(PAUSED).loop.works
