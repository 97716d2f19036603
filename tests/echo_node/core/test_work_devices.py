"""A node's work loop with the engines of two devices: it splits leases, and handles an engine that pauses, dies or is
replaced.
"""

from __future__ import annotations

from echo_node.core.effects import (
    AddPolicy,
    CancelLease,
    EndEngine,
    FetchArtefact,
    ResumeEngine,
    ScoreCompletion,
    SpoolRollout,
    StartEngine,
    SubmitGroup,
    SuspendEngine,
)
from echo_node.core.events import (
    EngineLost,
    EngineOutdated,
    EngineReady,
    Holding,
    LeaseCancelled,
    LeaseFailed,
    NodeTick,
    RolloutsDrawn,
    RolloutsFinished,
)
from echo_node.core.manners import Hold, HoldReason
from echo_node.core.yielding import YIELD_S
from echo_shared.wire.messages import LeaseReturned, NodeStatus, PolicyPublished
from tests.echo_node.core.loop_parts import WIDTH, Node, drawn, ended, here, lease
from tests.echo_node.core.test_checks import lease as check_lease
from tests.echo_node.core.test_policies import offer as real_offer

ONE, TWO = "cuda:0", "cuda:1"
PAUSED = Hold(HoldReason.PAUSED, "cuda:1 is paused by you.")


def two() -> Node:
    return Node(devices=(ONE, TWO)).ready()


def hold(*devices: str) -> Holding:
    return Holding(holds=(), keep_memory_s=60.0, of_devices=dict.fromkeys(devices, (PAUSED,)))


def submitted(node: Node) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(one.device, one.request.lease_id, one.request.indices) for one in node.of(SubmitGroup)]


def finished_on(device: str, lease_id: int, index: int) -> RolloutsFinished:
    rollouts = ended(lease_id, index, 0, tokens=3).rollouts
    return RolloutsFinished(rollouts=rollouts, tokens_per_s=50.0, device=device)


def returned(node: Node) -> list[tuple[int, tuple[int, ...]]]:
    return [(one.lease_id, one.indices) for one in node.ever_sent(LeaseReturned)]


def test_the_window_is_the_sum_and_leases_are_spread_over_the_engines() -> None:
    node = Node(devices=(ONE, TWO))
    node.ready()
    assert [(one.device, one.policy_version) for one in node.wanted if isinstance(one, AddPolicy)] == [
        (ONE, 0),
        (TWO, 0),
    ]
    assert node.sent(NodeStatus)[-1].capacity == 2 * 2 * WIDTH
    assert submitted(node(lease(1, count=3))) == [(ONE, 1, (0, 1, 2))]
    assert submitted(node(lease(2, count=3))) == [(TWO, 2, (0, 1, 2))], "only this engine can start all three"
    assert submitted(node(lease(3, count=2))) == [(ONE, 3, (0,)), (TWO, 3, (1,))]


def test_both_engines_get_each_new_version() -> None:
    node = two()(PolicyPublished(policy_version=1, offer=real_offer(1)))
    assert len(node.of(FetchArtefact)) == 1
    node(here(1))
    assert node.of(AddPolicy) == [AddPolicy(policy_version=1, device=ONE), AddPolicy(policy_version=1, device=TWO)]


def test_a_paused_device_hands_its_rollouts_to_the_other() -> None:
    node = two()(lease(1, count=4), lease(2, count=4), hold(TWO))
    assert node.of(CancelLease) == [CancelLease(lease_id=2, device=TWO)] and node.of(SuspendEngine) == []
    status = node.sent(NodeStatus)[-1]
    assert (status.activity, status.capacity) == ("sampling", 2 * WIDTH)
    node(RolloutsDrawn(parts=(drawn(2, 0, 0, 5, 6),), device=TWO))
    node(LeaseCancelled(lease_id=2, device=TWO))
    assert submitted(node) == [(ONE, 2, (0, 1, 2, 3))]
    assert [(one.index, one.ids.tolist()) for one in node.of(SubmitGroup)[0].request.prefixes] == [(0, [5, 6])]
    assert node.of(SuspendEngine) == [SuspendEngine(device=TWO)]
    assert node.loop.held_back_by(0.0) == () and not node.loop.rests and returned(node) == []
    node(hold())
    assert node.of(ResumeEngine) == [ResumeEngine(device=TWO)] and node.sent(NodeStatus)[-1].capacity == 4 * WIDTH


def test_leases_that_the_other_device_cannot_finish_go_back_to_the_hub() -> None:
    node = two()
    node(*(lease(number, count=4) for number in range(1, 5)), hold(TWO))
    assert {one.lease_id for one in node.of(CancelLease)} == {2, 4}
    node(LeaseCancelled(lease_id=2, device=TWO), LeaseCancelled(lease_id=4, device=TWO))
    assert returned(node) == [(2, (0, 1, 2, 3)), (4, (0, 1, 2, 3))], "the other engine's window of 8 is full"
    assert {one.reason for one in node.ever_sent(LeaseReturned)} == {"the machine's owner needs cuda:1"}


def test_an_engine_that_does_not_answer_is_suspended_and_its_late_reports_are_void() -> None:
    node = two()(lease(1, count=4), lease(2, count=4), hold(TWO))
    assert submitted(node(NodeTick(), after_s=YIELD_S / 2)) == []
    node(NodeTick(), after_s=YIELD_S / 2)
    assert submitted(node) == [(ONE, 2, (0, 1, 2, 3))] and node.of(SuspendEngine) == [SuspendEngine(device=TWO)]
    assert node(RolloutsDrawn(parts=(drawn(2, 0, 0, 5),), device=TWO)).loop.progress.tokens == 0
    assert node(finished_on(TWO, 2, 0)).of(SpoolRollout) == []
    assert len(node(finished_on(ONE, 2, 0)).of(SpoolRollout)) == 1
    node(hold(), finished_on(ONE, 1, 0))
    node(EngineLost(what="killed", device=ONE))
    assert submitted(node) == [(TWO, 1, (1, 2, 3))], "it has not confirmed that it stopped lease 2"
    assert submitted(node(LeaseCancelled(lease_id=2, device=TWO))) == [(TWO, 2, (1, 2, 3))]


def test_only_all_devices_paused_pause_the_node() -> None:
    node = two()(lease(1, count=4), hold(TWO), hold(ONE, TWO))
    assert node.sent(NodeStatus)[-1].activity == "paused"
    node(LeaseCancelled(lease_id=1, device=ONE))
    assert returned(node) == [(1, (0, 1, 2, 3))]
    assert node(lease(2)).sent(LeaseReturned)[0].reason == "the machine is its owner's"
    assert node.loop.rests


def test_an_engine_that_dies_leaves_its_rollouts_to_the_other() -> None:
    node = two()(lease(1, count=4), lease(2, count=4))
    node(RolloutsDrawn(parts=(drawn(2, 1, 0, 5, 6),), device=TWO))
    node(EngineLost(what="killed", device=TWO))
    assert node.of(StartEngine) == [StartEngine(after_s=0.0, device=TWO)]
    assert submitted(node) == [(ONE, 2, (0, 1, 2, 3))]
    assert [(one.index, one.ids.tolist()) for one in node.of(SubmitGroup)[0].request.prefixes] == [(1, [5, 6])]
    status = node.sent(NodeStatus)[-1]
    assert (status.activity, status.capacity) == ("sampling", 2 * WIDTH)
    problems = node.loop.engine_problems
    assert problems[ONE] is None and problems[TWO] is not None
    node(EngineReady(width=2, device=TWO))
    assert node.sent(NodeStatus)[-1].capacity == 2 * WIDTH + 2 * 2
    assert submitted(node(lease(3, count=2))) == [(TWO, 3, (0, 1))]


def test_an_engine_that_does_not_start_costs_the_other_one_nothing() -> None:
    node = Node(devices=(ONE, TWO)).ready()(lease(1, count=4), EngineLost(what="gone", device=TWO))
    node(EngineLost(what="no driver", device=TWO))
    assert returned(node) == [] and node.of(CancelLease) == []
    assert node.of(StartEngine)[0].after_s > 0
    node(EngineLost(what="killed", device=ONE), EngineLost(what="no model", device=ONE))
    assert returned(node) == [(1, (0, 1, 2, 3))], "no engine is up"


def test_out_of_memory_narrows_one_engine() -> None:
    node = two()(EngineLost(what="full", cause="out_of_memory", width=4, device=ONE))
    assert node.of(StartEngine) == [StartEngine(after_s=0.0, max_width=2, device=ONE)]
    assert node.sent(NodeStatus)[-1].capacity == 2 * WIDTH


def test_a_lease_that_kills_engines_does_not_stop_the_work_of_others() -> None:
    node = two()(lease(1, count=4), EngineLost(what="crashed", device=ONE))
    assert submitted(node) == [(TWO, 1, (0, 1, 2, 3))]
    node(EngineReady(width=WIDTH, device=ONE), lease(2, count=2), EngineLost(what="crashed", device=TWO))
    assert submitted(node) == [], "lease 1 is a suspect, and waits until an engine is free"
    node(EngineReady(width=WIDTH, device=TWO))
    assert submitted(node) == [(TWO, 1, (0, 1, 2, 3))]
    assert submitted(node(lease(3, count=2))) == [(ONE, 3, (0, 1))], "nothing else runs with a suspect"
    node(EngineLost(what="crashed", device=TWO))
    assert returned(node) == [(1, (0, 1, 2, 3))]
    assert submitted(node(EngineReady(width=WIDTH, device=TWO), lease(4, count=4))) == [(TWO, 4, (0, 1, 2, 3))]


def test_a_lease_that_one_engine_cannot_sample_is_returned_whole() -> None:
    node = two()(lease(1, count=8))
    assert submitted(node) == [(ONE, 1, (0, 1, 2, 3)), (TWO, 1, (4, 5, 6, 7))]
    node(finished_on(TWO, 1, 4), LeaseFailed(lease_id=1, what="too long", device=ONE))
    assert node.of(CancelLease) == [CancelLease(lease_id=1, device=TWO)]
    assert returned(node) == [(1, (0, 1, 2, 3, 5, 6, 7))]


def test_a_split_lease_that_leaves_waits_for_both_engines() -> None:
    node = two()(lease(1, count=8), Holding(holds=(PAUSED,), keep_memory_s=60.0))
    assert node.of(CancelLease) == [CancelLease(lease_id=1, device=ONE), CancelLease(lease_id=1, device=TWO)]
    node(LeaseCancelled(lease_id=1, device=TWO))
    assert returned(node) == [] and node.of(SuspendEngine) == [SuspendEngine(device=TWO)]
    node(RolloutsDrawn(parts=(drawn(1, 0, 0, 7),), device=ONE), LeaseCancelled(lease_id=1, device=ONE))
    assert returned(node) == [(1, tuple(range(8)))] and node.of(SuspendEngine) == [SuspendEngine(device=ONE)]


def test_no_engine_samples_a_split_lease_that_leaves_again() -> None:
    node = two()(lease(1, count=8, deadline_s=10.0))
    node(NodeTick(), after_s=20.5)
    assert node.of(CancelLease) == [CancelLease(lease_id=1, device=ONE), CancelLease(lease_id=1, device=TWO)]
    assert submitted(node(LeaseCancelled(lease_id=1, device=ONE))) == [] and returned(node) == []
    assert submitted(node(LeaseCancelled(lease_id=1, device=TWO))) == []
    assert returned(node) == [(1, tuple(range(8)))]


def test_new_settings_replace_both_engines() -> None:
    node = two()(lease(1, count=8), EngineOutdated())
    assert len(node.of(CancelLease)) == 2
    node(LeaseCancelled(lease_id=1, device=ONE))
    assert node.of(EndEngine) == [EndEngine(device=ONE)]
    node(EngineLost(what="ended", cause="stopped", device=ONE), EngineReady(width=WIDTH, device=ONE))
    assert submitted(node) == [(ONE, 1, (0, 1, 2, 3))]


def test_a_refused_engine_starts_again_with_new_settings() -> None:
    node = Node(devices=(ONE, TWO)).ready()
    node(EngineLost(what="gone", cause="stopped", device=TWO))
    node(EngineReady(width=WIDTH, precision="bf16", device=ONE), EngineReady(width=WIDTH, precision="f16", device=TWO))
    assert node.of(EndEngine) == [EndEngine(device=TWO)] and node.loop.status(0.0).precision == "bf16"
    assert node(EngineLost(what="ended", cause="stopped", device=TWO)).of(StartEngine) == []
    node(lease(1), EngineOutdated())
    assert node.of(StartEngine) == [StartEngine(after_s=0.0, device=TWO)]


def test_checks_go_to_the_engine_with_fewer_of_them() -> None:
    node = Node(devices=(ONE, TWO)).ready()
    node(*(EngineReady(width=WIDTH, scores=True, device=device) for device in (ONE, TWO)))
    for number in (1, 2):
        node(check_lease(number, 0))
    assert [one.device for one in node.wanted if isinstance(one, ScoreCompletion)] == [ONE, TWO]


def test_each_device_is_shown_with_its_rollouts() -> None:
    node = two()(lease(1, count=3), hold(TWO))
    shown = [(one.device, one.state, one.rollouts) for one in node.loop.devices(node.now)]
    assert shown == [(ONE, "working", 3), (TWO, "paused", 0)]
