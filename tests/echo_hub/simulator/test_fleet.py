"""Events that the hub gets from simulated nodes that join, leave, fail and lie."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import pytest

from echo_hub.core.accounting.effects import RevokeLease, SendLease
from echo_hub.core.accounting.events import (
    Event,
    LeaseGivenBack,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    RolloutArrived,
)
from echo_hub.simulator.agenda import Agenda
from echo_hub.simulator.fleet import SimulatedFleet
from echo_hub.simulator.scenario import Scenario
from echo_shared.records.rollout import DrawnSpan
from echo_shared.wire.messages import DropReason

_T = TypeVar("_T")


class Heard:
    """Records the events, with their times, that the hub gets from the only node of the small world."""

    def __init__(self, scenario: Scenario) -> None:
        self.agenda = Agenda()
        self.events: list[tuple[float, Event]] = []
        self.fleet = SimulatedFleet(scenario, agenda=self.agenda, hub=self)
        self.fleet.begin()

    def tell(self, event: Event) -> None:
        self.events.append((self.agenda.now, event))

    def until(self, moment: float) -> None:
        while self.agenda.next_at <= moment:
            self.agenda.advance()

    def lease(self, lease_id: int, *indices: int, version: int = 0, goes_on: tuple[tuple[int, int], ...] = ()) -> None:
        self.fleet.send_lease(
            SendLease(
                node_id="node-0",
                lease_id=lease_id,
                group_id=0,
                indices=indices,
                seed=0,
                policy_version=version,
                deadline_s=60.0,
                goes_on=goes_on,
            )
        )

    def of(self, kind: type[_T]) -> list[tuple[float, _T]]:
        return [(at, event) for at, event in self.events if isinstance(event, kind)]

    def times(self, kind: type[Any]) -> list[float]:
        return [at for at, _ in self.of(kind)]


@pytest.fixture
def heard(scenario_of: Callable[..., Scenario]) -> Callable[..., Heard]:
    return lambda **sections: Heard(scenario_of(**sections))


def test_a_node_comes_with_twice_its_width_and_the_base(heard: Callable[..., Heard]) -> None:
    assert [event for _, event in heard().events] == [
        NodeConnected(node_id="node-0"),
        NodeReported(node_id="node-0", capacity=4, policy_version=0, tokens_per_s=2 / 0.02),
    ]


def test_a_lease_goes_there_is_sampled_and_comes_back(heard: Callable[..., Heard]) -> None:
    hub = heard()
    hub.lease(1, 0, 1)
    hub.until(100)
    ((at, first), (_, second)) = hub.of(RolloutArrived)
    assert at == pytest.approx(0.05 + 2.0 + 0.05)
    assert (first.rollout_id, second.rollout_id, first.policy_version_end) == ("1-0", "1-1", 0)
    assert (len(first.payload.completion_ids), first.payload.sampling_s) == (100, pytest.approx(2.0))
    assert len(first.payload.behavior_logprobs) == 100


def test_a_revoked_rollout_does_not_arrive(heard: Callable[..., Heard]) -> None:
    hub = heard()
    hub.lease(1, 0, 1)
    hub.until(1)
    hub.fleet.revoke(RevokeLease(node_id="node-0", lease_id=1, reason=DropReason.REVOKED))
    hub.until(100)
    assert hub.of(RolloutArrived) == []


def test_a_lease_that_is_sent_again_is_sampled_once(heard: Callable[..., Heard]) -> None:
    hub = heard()
    for _ in range(2):
        hub.lease(1, 0, 1)
    hub.until(100)
    assert hub.times(RolloutArrived) == pytest.approx([2.1, 2.1])


def test_a_rollout_finished_offline_is_not_sampled_again(heard: Callable[..., Heard]) -> None:
    """Node 0 vanishes while its two rollouts of 20 s are in progress, completes them offline, and sends them on its
    return.
    """
    hub = heard(nodes={"s_per_token": 0.2}, failures={"per_hour": 1_000.0, "away_s": 60.0, "lost_share": 0.0})
    hub.lease(1, 0, 1)
    while len(hub.of(NodeConnected)) < 2:
        hub.agenda.advance()
    hub.lease(1, 0, 1)
    hub.until(hub.agenda.now + 50)
    assert len(hub.of(RolloutArrived)) == 2


def test_a_version_is_fetched_and_said_and_the_newest_is_next(heard: Callable[..., Heard]) -> None:
    hub = heard()
    for version in (1, 2, 3):
        hub.fleet.announce(version)
    hub.until(100)
    said = [(at, event.policy_version) for at, event in hub.of(NodeReported)[1:]]
    assert said == [(pytest.approx(0.35), 1), (pytest.approx(0.65), 3)]


def test_a_lease_waits_for_the_fetch_of_its_version(heard: Callable[..., Heard]) -> None:
    hub = heard()
    hub.fleet.announce(1)
    hub.lease(1, 0, version=1)
    hub.until(100)
    assert hub.times(RolloutArrived) == [pytest.approx(0.3 + 2.0 + 0.05)]


def test_a_node_returns_its_work_at_the_days_end_and_comes_back(heard: Callable[..., Heard]) -> None:
    hub = heard(availability={"on_share": 0.5, "day_s": 100.0})
    hub.until(1_000)
    came, went = hub.times(NodeConnected), hub.times(NodeDisconnected)
    # This node is there from the start, because its first day began before the run.
    assert [after - before for before, after in pairwise(came[1:])] == pytest.approx([100.0] * (len(came) - 2))
    assert [gone - next(at for at in reversed(came) if at < gone) for gone in went[1:]] == pytest.approx(
        [50.0] * (len(went) - 1)
    )


def test_unfinished_work_is_given_back_at_the_end_of_the_day(heard: Callable[..., Heard]) -> None:
    hub = heard(availability={"on_share": 0.5, "day_s": 100.0}, nodes={"s_per_token": 10.0})
    while not hub.of(NodeConnected):
        hub.agenda.advance()
    hub.lease(7, 0, 1)
    while not hub.of(NodeDisconnected):
        hub.agenda.advance()
    ((at, back),) = hub.of(LeaseGivenBack)
    assert (back.lease_id, back.indices, at) == (7, (0, 1), hub.times(NodeDisconnected)[0])


@pytest.mark.parametrize(("lost_share", "arrived"), [(1.0, 0), (0.0, 2)])
def test_a_vanished_nodes_rollouts_are_lost_or_sent_on_its_return(
    heard: Callable[..., Heard], lost_share: float, arrived: int
) -> None:
    """Node 0 vanishes about every 3.6 s and a rollout takes 20 s, so an interruption is almost certain."""
    hub = heard(nodes={"s_per_token": 0.2}, failures={"per_hour": 1_000.0, "away_s": 60.0, "lost_share": lost_share})
    hub.lease(1, 0, 1)
    hub.until(1.0)
    assert hub.of(NodeDisconnected) == []
    hub.until(200)
    gone, back = hub.times(NodeDisconnected)[0], hub.times(NodeConnected)[1]
    assert gone < 20 and back == pytest.approx(gone + 60)
    assert hub.times(RolloutArrived) == pytest.approx([back + 0.05] * arrived)


def test_a_liar_has_every_version_at_once_and_returns_with_a_fresh_key(heard: Callable[..., Heard]) -> None:
    hub = heard(false_claims={"count": 1, "capacity": 4096, "fresh_key_s": 10.0})
    hub.fleet.announce(1)
    hub.until(25)
    keys = [event.node_id for _, event in hub.of(NodeConnected) if event.node_id != "node-0"]
    assert keys == ["liar-1", "liar-2", "liar-3"]
    claims = [event for _, event in hub.of(NodeReported) if event.node_id == "liar-1"]
    assert [(claim.capacity, claim.policy_version) for claim in claims] == [(4096, 0), (4096, 1)]


def test_tokens_sampled_before_a_pause_are_not_sampled_again(heard: Callable[..., Heard]) -> None:
    """Node 0 pauses about every 4 s and a rollout takes 20 s. Each token must be sampled only once."""
    hub = heard(nodes={"s_per_token": 0.2, "stream_s": 0.0}, availability={"pauses_per_hour": 1_000.0, "pause_s": 30.0})
    hub.lease(1, 0)
    while not hub.of(RolloutArrived):
        given_back = hub.of(LeaseGivenBack)
        hub.agenda.advance()
        if len(hub.of(LeaseGivenBack)) > len(given_back):
            at, back = hub.of(LeaseGivenBack)[-1]
            assert (back.indices, back.reason) == ((0,), "the node is paused")
            hub.until(at + 30.1)
            assert [event.capacity for _, event in hub.of(NodeReported)][-2:] == [0, 4]
            hub.lease(back.lease_id + 1, 0, goes_on=((0, back.lease_id),))
    pauses = len(hub.of(LeaseGivenBack))
    assert pauses > 1
    hub.fleet.ended(0)
    tokens = hub.fleet.tokens
    assert (tokens.drawn, tokens.again, tokens.failures) == (100, 0, 0) and tokens.given > 0


def test_a_lease_to_a_paused_node_comes_back_at_once(heard: Callable[..., Heard]) -> None:
    hub = heard(availability={"pauses_per_hour": 1_000.0, "pause_s": 1e6})
    while len(hub.of(NodeReported)) < 2:
        hub.agenda.advance()
    hub.lease(1, 0)
    hub.until(hub.agenda.now + 10)
    assert [back.lease_id for _, back in hub.of(LeaseGivenBack)] == [1]


def test_unstreamed_tokens_are_lost_with_their_node_and_sampled_again(heard: Callable[..., Heard]) -> None:
    """Each token takes 0.5 s, and the node streams its tokens to the hub every 5 s. If the node vanishes, the tokens
    sampled after its last message are lost.
    """
    hub = heard(nodes={"s_per_token": 0.5}, failures={"per_hour": 360.0, "away_s": 1.0, "lost_share": 1.0})
    hub.lease(1, 0)
    while not hub.of(NodeDisconnected):
        hub.agenda.advance()
    gone_at = hub.times(NodeDisconnected)[0]
    drawn, streamed = (int((at - 0.05) / 0.5) for at in (gone_at, gone_at // 5 * 5))
    assert drawn > streamed > 0
    assert (hub.fleet.tokens.lost, hub.fleet.tokens.failures) == (drawn - streamed, 1)
    hub.until(gone_at + 1)
    hub.lease(2, 0, goes_on=((0, 1),))
    hub.until(hub.agenda.now + 0.05)
    hub.fleet.ended(0)
    assert (hub.fleet.tokens.drawn, hub.fleet.tokens.given) == (drawn, streamed)


def test_a_second_lease_samples_unstreamed_tokens_twice(heard: Callable[..., Heard]) -> None:
    hub = heard(nodes={"s_per_token": 0.1})
    hub.lease(1, 0)
    hub.until(7.0)
    hub.agenda.now = 7.0
    hub.lease(2, 0, goes_on=((0, 1),))
    hub.until(100.0)
    first, second = hub.times(RolloutArrived)
    given = 49  # In 5 s the node has sampled 50 tokens, the last one after the second lease was sent.
    assert (first, second) == pytest.approx((10.1, 7.05 + (100 - given) * 0.1 + 0.05))
    hub.fleet.ended(0)
    tokens = hub.fleet.tokens
    assert (tokens.drawn, tokens.given, tokens.again) == (100 + 51, given, 51)


def test_a_rollouts_spans_name_nodes_and_versions(heard: Callable[..., Heard]) -> None:
    """Version 1 reaches the node at 4.3 s, after 42 tokens, and is in use from 4.4 s on."""
    hub = heard(nodes={"s_per_token": 0.1}, training={"on_new_version": "interrupt"})
    hub.lease(1, 0)
    hub.until(4.0)
    hub.agenda.now = 4.0
    hub.fleet.announce(1)
    hub.until(6.0)
    hub.agenda.now = 6.0
    hub.lease(2, 0, goes_on=((0, 1),))
    hub.until(100.0)
    ((first_at, first), (second_at, second)) = hub.of(RolloutArrived)
    mine = [
        DrawnSpan(node_id="node-0", policy_version=version, num_tokens=count) for version, count in ((0, 42), (1, 58))
    ]
    assert first.payload.spans == tuple(mine) == second.payload.spans
    assert (first.policy_version_start, first.policy_version_end) == (0, 1)
    assert first_at == pytest.approx(0.05 + 4.2 + 0.05 + 0.1 + 5.8 + 0.05)
    # At 5 s the hub has 48 tokens of the node, 6 of them of version 1. So the second lease continues with version 1,
    # without naming it.
    assert second_at == pytest.approx(6.05 + (100 - 48) * 0.1 + 0.05)


def test_a_nodes_own_tokens_of_the_leases_version_need_no_spans(heard: Callable[..., Heard]) -> None:
    hub = heard(training={"on_new_version": "interrupt"})
    hub.lease(1, 0)
    hub.until(100.0)
    assert [event.payload.spans for _, event in hub.of(RolloutArrived)] == [()]


def test_without_streaming_nothing_is_continued(heard: Callable[..., Heard]) -> None:
    hub = heard(nodes={"s_per_token": 0.1, "stream_s": 0.0})
    hub.lease(1, 0)
    hub.until(7.0)
    hub.lease(2, 0, goes_on=((0, 1),))
    hub.until(100.0)
    hub.fleet.ended(0)
    assert hub.fleet.tokens.given == 0


def test_the_planner_serves_few_nodes_and_the_formula_many(heard: Callable[..., Heard]) -> None:
    """The simulation of a small fleet uses the real broadcast planner. It measures the line first, so 4 MB take longer
    than the 0.32 s that the line alone would need. With more than `planned_nodes` nodes, a formula gives the time.
    """
    lines = {"payload_bytes": 4e6, "planned_nodes": 1}
    hub = heard(publication=lines)
    hub.fleet.announce(1)
    hub.until(100)
    (_, (at, report)) = hub.of(NodeReported)
    by_formula = 0.3 + 1.1 * 0.32 + 0.05
    assert report.policy_version == 1 and 1.05 * 0.32 + 0.22 < at < 1.5 and at != pytest.approx(by_formula)
    many = heard(publication=lines, nodes={"count": 2})
    many.fleet.announce(1)
    many.until(100)
    assert many.times(NodeReported)[2:] == pytest.approx([0.3 + 1.1 * 8 / 17.5 + 0.05] * 2)


def test_a_node_that_joins_during_a_broadcast_fetches_by_itself(heard: Callable[..., Heard]) -> None:
    hub = heard(
        nodes={"count": 2},
        publication={"payload_bytes": 8e6, "hub_uplink_bytes_s": 1e6},
        failures={"per_hour": 1_000.0, "away_s": 1.0},
        measuring={"limit_s": 1e3},
    )
    hub.fleet.announce(1)
    while not all(node.policy_version == 1 for node in hub.fleet.honest):
        hub.agenda.advance()
    assert len(hub.of(NodeDisconnected)) > 2 and hub.agenda.now < 900
