"""The hub keeps enough nodes active (given leases) for the learner: within the spending cap in dollars per hour, the
cheapest ones, and with few changes. Other nodes are on standby, and are told why.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_hub.core.accounting.effects import CostAccrued, TellStandby
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.activation import activation as activation_module
from echo_hub.core.activation.activation import (
    GIFTS_ROUND_S,
    HANG_S,
    IDLE_S,
    LOST_S,
    REACT_S,
    ROUND_S,
    SILENT_S,
    TRIAL_S,
    TURN_S,
    Activation,
)
from echo_hub.core.activation.choice import Demand
from echo_hub.core.activation.settings import HYSTERESIS, ActivationSettings
from echo_hub.core.nodes.node import Node, NodeSettings
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.policy.measured import CompletionLengths
from echo_shared.wire.messages import StandbyReason

SETTINGS = NodeSettings(samplers="by_version", lease_size=8, deadline_s=60.0, first_window=4, unproven_most=64)
TOKENS = 100
STEP_S = 10.0
NEED = Demand(rollouts_per_step=100, step_s=STEP_S, max_staleness=2, publish_every=1)


class Fleet:
    """Nodes of given speeds, and the standby reasons that they were told. `cap`: the spending cap, in dollars per
    hour.
    """

    def __init__(self, cap: float = 1e6, **changes: Any) -> None:
        self.nodes = Nodes(SETTINGS)
        self.out = Outbox()
        lengths = CompletionLengths()
        lengths.seen(None, TOKENS)
        self.settings = ActivationSettings(spend_cap_per_hour=cap, **changes)
        self.activation = Activation(self.settings, nodes=self.nodes, lengths=lengths, out=self.out)
        self.now = 1_000.0
        self.told: dict[str, StandbyReason | None] = {}
        self.details: dict[str, str] = {}
        self.num_changes = 0
        self.dollars = 0.0
        self.turns: list[Node] = []

    def join(self, node_id: str, cost: float = 0.0, *, per_step: float | None = None, rollout_s: float = 1.0) -> None:
        """Connect a node that can return `per_step` rollouts per step; None: a new node without results."""
        self.nodes.connect(node_id, cost)
        self.activation.connected(node_id, self.now)
        self.activation.reported(node_id, 8, 0, self.now)
        self.nodes.report(node_id, 8, 0)
        if per_step is not None:
            self.measured(node_id, per_step, rollout_s)

    def measured(self, node_id: str, per_step: float, rollout_s: float = 1.0) -> None:
        node = self.node(node_id)
        node.proven = True
        node.pace.tokens_per_s, node.pace.token_s = per_step / STEP_S * TOKENS, rollout_s / TOKENS

    def leave(self, node_id: str) -> None:
        self.activation.disconnected(node_id, NEED, self.now)
        self.nodes.disconnect(node_id)

    def hang(self, node_id: str) -> None:
        self.nodes.take(node_id, 1, TOKENS, self.now)
        self.nodes.mark_late(node_id, self.now)

    def go_again(self, node_id: str) -> None:
        """End the hang: the hub stops waiting for the node's overdue rollout."""
        self.nodes.release(node_id, TOKENS, overdue=False, late=True)

    def node(self, node_id: str) -> Node:
        node = self.nodes.get(node_id)
        assert node is not None
        return node

    def go_on(self, seconds: float = ROUND_S + REACT_S, demand: Demand | None = NEED) -> None:
        """Advance the clock by `seconds` and handle all that becomes due, checking each time that the active nodes cost
        no more than the cap.
        """
        end = self.now + seconds
        while self.activation.due_at <= end:
            self.now = max(self.now, self.activation.due_at)
            self.turns += self.activation.advance(demand, self.now)
            for effect in self.out.take():
                if isinstance(effect, TellStandby):
                    self.told[effect.node_id] = effect.reason
                    self.details[effect.node_id] = effect.detail
                    self.num_changes += 1
                elif isinstance(effect, CostAccrued):
                    self.dollars += sum(cost.dollars for cost in effect.nodes)
            assert sum(self.node(n).per_hour for n in self.active) <= self.settings.spend_cap_per_hour * (1 + 1e-9)
            assert self.activation.spend_per_hour == pytest.approx(sum(self.node(n).per_hour for n in self.active))
        self.now = end

    @property
    def active(self) -> set[str]:
        known = (self.node(node_id) for node_id in self.nodes.ids())
        return {node.node_id for node in known if node.connected and node.active and node.per_hour}


def test_donated_nodes_always_work() -> None:
    fleet = Fleet(cap=0.0)
    fleet.join("gift", per_step=1.0)
    fleet.join("dear", 0.1, per_step=1_000.0)
    fleet.go_on()
    assert not fleet.active and fleet.node("gift").active and fleet.told == {"dear": StandbyReason.SPEND_CAP}
    assert fleet.activation.due_at < inf and fleet.dollars == 0


def test_where_gifts_suffice_the_others_stand_by() -> None:
    fleet = Fleet()
    fleet.join("gift", per_step=120.0)
    fleet.join("new", 0.1)
    fleet.join("known", 0.1, per_step=50.0)
    fleet.go_on()
    assert not fleet.active
    assert fleet.told == dict.fromkeys(["new", "known"], StandbyReason.CHEAPER_NODES_SUFFICE)


def test_until_a_step_is_trained_the_cap_alone_limits() -> None:
    fleet = Fleet(cap=0.35)
    fleet.join("gift", per_step=120.0)
    for number in range(5):
        fleet.join(f"{number}", 0.1)
    fleet.go_on(demand=None)
    assert len(fleet.active) == 3
    fleet.go_on(ROUND_S + fleet.settings.dwell_s)
    assert not fleet.active, "the free node is enough"
    assert fleet.dollars == pytest.approx(0.3 * (ROUND_S + 2 * REACT_S) / 3600, rel=0.5)


def test_the_cheapest_by_rollout_are_chosen() -> None:
    fleet = Fleet()
    fleet.join("gift", per_step=35.0)
    fleet.join("small", 0.1, per_step=10.0)
    fleet.join("large", 0.6, per_step=80.0)
    fleet.join("dear", 0.9, per_step=80.0)
    fleet.go_on()
    assert fleet.active == {"large"}, "35 + 80 are 1.15 times 100"


def test_a_lost_node_is_replaced_within_a_second() -> None:
    fleet = Fleet()
    fleet.join("gift", per_step=120.0)
    fleet.join("one", 0.2, per_step=120.0)
    fleet.join("two", 0.3, per_step=120.0)
    fleet.go_on(30.0)
    assert not fleet.active
    fleet.leave("gift")
    fleet.go_on(REACT_S)
    assert fleet.active == {"one"} and fleet.told["one"] is None
    fleet.hang("one")
    fleet.go_on(SILENT_S + ROUND_S)
    assert fleet.active == {"one", "two"}, "a hanging node may recover, so it is kept for now"
    fleet.go_again("one")
    fleet.go_on(HANG_S + ROUND_S)
    assert fleet.active == {"one"}, "it did"
    fleet.hang("one")
    fleet.go_on(LOST_S + TRIAL_S)
    assert fleet.active == {"two"}


def test_the_cap_binds_and_is_reported() -> None:
    fleet = Fleet(cap=0.5)
    for number in range(4):
        fleet.join(f"{number}", 0.2, per_step=40.0)
    fleet.join("beyond", 0.6, per_step=4_000.0)
    fleet.go_on()
    assert len(fleet.active) == 2 and "beyond" not in fleet.active
    assert {fleet.told[n] for n in {"0", "1", "2", "3", "beyond"} - fleet.active} == {StandbyReason.SPEND_CAP}


def test_a_node_too_slow_for_the_deadline_is_told_and_a_donated_one_gets_turns() -> None:
    fleet = Fleet()
    fleet.join("gift", per_step=120.0)
    fleet.join("slow", per_step=4.0, rollout_s=25.0)
    fleet.join("slow and dear", 0.1, per_step=4.0, rollout_s=25.0)
    fleet.go_on(3 * IDLE_S)
    assert fleet.told["slow"] is fleet.told["slow and dear"] is StandbyReason.TOO_SLOW
    assert not fleet.turns
    fleet.go_on(TURN_S)
    assert {node.node_id for node in fleet.turns} == {"slow"}
    fleet.activation.had_turn("7-0", "slow", fleet.now)
    fleet.activation.came_late("someone else", "7-0", TOKENS, 0.5, fleet.now + 1)
    assert fleet.node("slow").pace.token_s == 25.0 / TOKENS
    for _ in range(40):
        fleet.activation.had_turn("7-0", "slow", fleet.now)
        fleet.now += 1.0
        fleet.activation.came_late("slow", "7-0", TOKENS, 0.5, fleet.now)
    assert fleet.node("slow").pace.token_s == pytest.approx(0.5 / TOKENS)
    fleet.go_on(IDLE_S)
    assert fleet.told["slow"] is StandbyReason.NO_WORK_NOW, "the node is fast by now"


def test_a_node_without_work_is_told_once_and_again_when_work_comes() -> None:
    fleet = Fleet()
    fleet.join("busy", per_step=60.0)
    fleet.join("idle", per_step=60.0)
    fleet.nodes.take("busy", 1, TOKENS, fleet.now)
    fleet.go_on(300.0)
    assert fleet.told == {"idle": StandbyReason.NO_WORK_NOW} and fleet.num_changes == 1
    fleet.nodes.take("idle", 1, TOKENS, fleet.now)
    fleet.go_on(IDLE_S)
    assert fleet.told == {"idle": None}


def test_a_trial_that_brings_nothing_ends_and_comes_again_later() -> None:
    fleet = Fleet()
    fleet.join("silent", 0.1)
    fleet.go_on()
    assert fleet.active == {"silent"}
    fleet.go_on(TRIAL_S + ROUND_S)
    assert not fleet.active and fleet.told["silent"] is StandbyReason.NO_WORK_NOW
    fleet.go_on(10 * 3_600.0)
    share = fleet.dollars / (0.1 * (fleet.now - 1_000.0) / 3_600)
    assert 0 < share < 0.2, "it is tried ever more rarely"


def test_a_new_node_that_gets_no_work_is_given_a_first_turn() -> None:
    fleet = Fleet()
    fleet.join("known", per_step=60.0)
    fleet.join("new")
    fleet.go_on(GIFTS_ROUND_S + REACT_S)
    assert [node.node_id for node in fleet.turns] == ["new"]
    fleet.nodes.take("new", 1, TOKENS, fleet.now)
    fleet.go_on(4 * GIFTS_ROUND_S)
    assert len(fleet.turns) == 1, "the node still holds its turn"


def test_a_new_node_is_tried_next_to_the_paid_ones_and_replaces_them() -> None:
    fleet = Fleet()
    for number in range(4):
        fleet.join(f"{number}", 0.4, per_step=40.0)
    fleet.go_on()
    assert len(fleet.active) == 3
    fleet.join("new", 0.1)
    fleet.go_on()
    assert "new" in fleet.active and len(fleet.active) == 4
    fleet.measured("new", 40.0)
    fleet.go_on(fleet.settings.dwell_s + ROUND_S)
    assert "new" in fleet.active and len(fleet.active) == 3


def priced_and_one_cheap(cheap: float) -> Fleet:
    """Return three priced nodes that together suffice, and a far cheaper one that was measured as fast as all three."""
    fleet = Fleet()
    for number in range(3):
        fleet.join(f"{number}", 0.4, per_step=40.0)
    fleet.go_on(2 * fleet.settings.dwell_s)
    fleet.join("cheap", cheap, per_step=120.0)
    fleet.go_on()
    return fleet


DEAR = {"0", "1", "2"}


@pytest.mark.parametrize("cheap", [0.0, 0.01])
def test_paid_nodes_stay_active_until_a_cheaper_one_is_settled(cheap: float) -> None:
    fleet = priced_and_one_cheap(cheap)
    assert fleet.node("cheap").active and fleet.active >= DEAR, "beside them"
    fleet.go_on(fleet.settings.dwell_s)
    assert fleet.node("cheap").active and not fleet.active & DEAR


@pytest.mark.parametrize("cheap", [0.0, 0.01])
def test_a_node_that_hangs_repeatedly_is_made_active_ever_more_rarely(cheap: float) -> None:
    """A cheap node that hangs repeatedly looks fast between its hangs, so the hub would choose it each time and send
    the paid nodes to standby. Each hang may leave the learner without paid nodes only for a bounded time."""
    fleet = priced_and_one_cheap(cheap)
    without, begun_at, num_hangs = 0.0, fleet.now, 0
    while fleet.now < begun_at + 6 * 3_600:
        if not fleet.active & DEAR:
            fleet.hang("cheap")
            while not fleet.active & DEAR:
                fleet.go_on(1.0)
                without += 1.0
            fleet.go_again("cheap")
            num_hangs += 1
        fleet.go_on(ROUND_S)
    assert 8 <= num_hangs <= 12 and without <= num_hangs * (SILENT_S + ROUND_S + REACT_S)


def test_the_cap_holds_when_it_has_no_room_for_both() -> None:
    fleet = Fleet(cap=1.25)
    for number in range(3):
        fleet.join(f"{number}", 0.4, per_step=40.0)
    fleet.go_on(2 * fleet.settings.dwell_s)
    fleet.join("cheap", 0.1, per_step=120.0)
    fleet.go_on()
    assert fleet.active == {"cheap"}


def test_a_node_measured_slow_because_it_hung_is_tried_again() -> None:
    fleet = Fleet()
    fleet.join("good", 0.1, per_step=60.0, rollout_s=30.0)
    for number in range(3):
        fleet.join(f"{number}", 0.4, per_step=40.0)
    fleet.go_on(fleet.settings.dwell_s + IDLE_S)
    assert "good" in fleet.active and {node.node_id for node in fleet.turns} == {"good"}
    fleet.activation.had_turn("7-0", "good", fleet.now)
    fleet.now += 1.0
    fleet.node("good").pace.begin(fleet.now)
    for _ in range(40):
        fleet.activation.had_turn("7-0", "good", fleet.now)
        fleet.now += 0.1
        fleet.activation.came_late("good", "7-0", TOKENS, 0.1, fleet.now)
    fleet.go_on(2 * fleet.settings.dwell_s)
    assert "good" in fleet.active and len(fleet.active) == 2, (
        '"good" alone is enough; the second node is the safety margin'
    )


def test_a_node_that_reconnects_is_not_tried_as_a_new_one() -> None:
    fleet, paid_s = Fleet(), 0.0
    for _ in range(200):
        fleet.join("silent", 0.1)
        begun_at = fleet.now
        fleet.go_on(TRIAL_S / 2)
        paid_s += (fleet.now - begun_at) * ("silent" in fleet.active)
        fleet.leave("silent")
        fleet.go_on(1.0)
    assert TRIAL_S / 2 <= paid_s < 0.25 * (fleet.now - 1_000.0)


def test_the_number_of_remembered_nodes_that_left_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_module, "LEFT_KEPT", 3)
    fleet = Fleet()
    for number in range(9):
        fleet.join(f"{number}", 0.1)
        fleet.go_on()
        fleet.leave(f"{number}")
    assert list(fleet.activation._left) == ["6", "7", "8"]


def test_a_paused_node_costs_nothing() -> None:
    fleet = Fleet()
    fleet.join("one", 0.4, per_step=120.0)
    fleet.go_on()
    assert fleet.active
    fleet.activation.reported("one", 0, 0, fleet.now)
    fleet.nodes.report("one", 0, 0)
    fleet.go_on(REACT_S)
    assert not fleet.active
    assert fleet.activation.spend_per_hour == 0


def test_at_the_runs_end_no_node_is_paid() -> None:
    fleet = Fleet()
    fleet.join("one", 0.4, per_step=120.0)
    fleet.go_on()
    fleet.activation.halt("The run is over.", fleet.now)
    fleet.go_on(0.0)
    assert not fleet.active and fleet.told["one"] is StandbyReason.NO_WORK_NOW


def test_an_idle_node_is_told_at_once_that_the_run_is_over() -> None:
    """At the run's end an idle node keeps the reason NO_WORK_NOW, but gets a new explanation. The node must be told of
    it at once."""
    fleet = Fleet()
    fleet.join("idle", per_step=60.0)
    fleet.join("new")
    fleet.join("quarantined")
    fleet.node("quarantined").quarantined = True
    fleet.go_on(300.0)
    assert (fleet.told["idle"], fleet.details["idle"]) == (StandbyReason.NO_WORK_NOW, "")
    fleet.activation.halt("The run is over.", fleet.now)
    fleet.go_on()
    assert fleet.details["idle"] == fleet.details["new"] == "The run is over." and "quarantined" not in fleet.told
    told = fleet.num_changes
    fleet.go_on(300.0)
    assert fleet.num_changes == told, "the node is told once"
    fleet.activation.halt("", fleet.now)
    fleet.go_on(300.0)
    assert (fleet.told["idle"], fleet.details["idle"]) == (StandbyReason.NO_WORK_NOW, "")


def test_in_a_pause_no_node_is_paid_and_afterwards_all_are_as_before() -> None:
    fleet = Fleet()
    fleet.join("one", 0.4, per_step=120.0)
    fleet.go_on()
    fleet.activation.halt("The operator has paused the run.", fleet.now)
    fleet.go_on(0.0)
    assert fleet.activation.spend_per_hour == 0
    fleet.activation.halt("", fleet.now)
    fleet.go_on()
    assert fleet.active == {"one"} and fleet.told["one"] is None


def test_under_a_lowered_cap_the_best_value_nodes_continue_at_once() -> None:
    fleet = Fleet(cap=3.0)
    for name, cost, per_step in (("good", 0.5, 60.0), ("fair", 1.0, 40.0), ("dear", 1.0, 20.0)):
        fleet.join(name, cost, per_step=per_step)
    fleet.go_on()
    assert fleet.active == {"good", "fair", "dear"}
    fleet.settings = replace(fleet.settings, spend_cap_per_hour=1.5)
    fleet.activation.change(fleet.settings, NEED, fleet.now)
    assert fleet.active == {"good", "fair"} and fleet.activation.spend_per_hour == 1.5
    fleet.go_on()
    assert fleet.active == {"good", "fair"} and fleet.told["dear"] is StandbyReason.SPEND_CAP
    fleet.settings = replace(fleet.settings, spend_cap_per_hour=0.0)
    fleet.activation.change(fleet.settings, NEED, fleet.now)
    assert not fleet.active
    fleet.settings = replace(fleet.settings, spend_cap_per_hour=3.0)
    fleet.activation.change(fleet.settings, NEED, fleet.now)
    fleet.go_on()
    assert fleet.active == {"good", "fair", "dear"}


FLEETS = st.lists(st.tuples(st.floats(0.5, 30.0), st.floats(1.0, 4.0), st.booleans()), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(FLEETS, st.floats(0.0, 12.0), st.integers(0, 2**31))
def test_enough_under_the_cap_and_near_the_optimum(
    rows: list[tuple[float, float, bool]], cap: float, seed: int
) -> None:
    fleet, chance = Fleet(cap, dwell_s=0.0), np.random.default_rng(seed)
    for number, (per_step, price, is_gift) in enumerate(rows):
        fleet.join(f"{number}", 0.0 if is_gift else per_step * price / 100, per_step=per_step)
    fleet.go_on(30.0)
    gifts = sum(per_step for per_step, _, is_gift in rows if is_gift)
    paid = [(price / 100, per_step) for per_step, price, is_gift in rows if not is_gift]
    costs = [price * per_step for price, per_step in paid]
    brought = sum(rows[int(node_id)][0] for node_id in fleet.active)
    need = NEED.rollouts_per_step * fleet.settings.margin
    if sum(costs) <= cap and gifts + sum(per_step for _, per_step in paid) >= need:
        assert gifts + brought >= need * (1 - HYSTERESIS) - 1e-6
        optimum, missing = 0.0, need - gifts
        for price, per_step in sorted(paid):
            part = max(0.0, min(per_step, missing))
            optimum, missing = optimum + price * part, missing - part
        assert fleet.activation.spend_per_hour <= 1.05 * optimum + max(costs, default=0.0) + 1e-9
    # Nodes join, leave and change speed; `go_on` checks after each change that the spending cap holds.
    for _ in range(10):
        number = int(chance.integers(len(rows)))
        node = fleet.nodes.get(f"{number}")
        if node is not None and node.connected and chance.random() < 0.5:
            fleet.leave(f"{number}")
        else:
            per_step, price, is_gift = rows[number]
            fleet.join(f"{number}", 0.0 if is_gift else per_step * price / 100, per_step=per_step * chance.lognormal())
        fleet.go_on(chance.uniform(0.0, 8.0))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.0, 0.08))
def test_noise_in_paces_changes_nothing(seed: int, noise: float) -> None:
    fleet, chance = Fleet(dwell_s=0.0), np.random.default_rng(seed)
    paces = chance.lognormal(1.5, 0.5, 60)
    for number, per_step in enumerate(paces.tolist()):
        fleet.join(f"{number}", per_step * chance.uniform(1, 4) / 100, per_step=per_step)
    fleet.go_on(30.0)
    changes = []
    for _ in range(100):
        for number, per_step in enumerate(paces.tolist()):
            fleet.measured(f"{number}", per_step * (1 + noise * chance.uniform(-1, 1)))
        active = fleet.active
        fleet.go_on(ROUND_S)
        changes.append(len(active ^ fleet.active))
    assert sum(changes) <= 16, "at most one change in six rounds, while the paces of all 60 nodes change"


def test_a_hundred_thousand_that_cost_something_are_done_in_slices() -> None:
    fleet, chance = Fleet(), np.random.default_rng(0)
    need = Demand(rollouts_per_step=20_000, step_s=STEP_S, max_staleness=2, publish_every=1)
    for number, per_step in enumerate(chance.lognormal(0, 0.5, 100_000).tolist()):
        fleet.join(f"{number}", per_step * 0.01, per_step=per_step)
    worst_s, began_at = 0.0, time.process_time()
    while fleet.activation.num_active < 15_000:
        fleet.now = max(fleet.now, fleet.activation.due_at)
        at = time.process_time()
        fleet.activation.advance(need, fleet.now)
        worst_s = max(worst_s, time.process_time() - at)
        fleet.out.take()
        assert time.process_time() - began_at < 60
    assert worst_s < 1.0, "about 50 ms on an idle machine"


@pytest.mark.parametrize("cost", [0.0, 0.1])
def test_a_node_whose_first_turn_is_late_is_told_that_it_is_too_slow(cost: float) -> None:
    """Late first rollouts are not scored: they show the node's speed, but do not prove the node's honesty."""
    fleet = Fleet()
    fleet.join("gift", per_step=40.0)
    fleet.join("slow", cost)
    fleet.go_on(GIFTS_ROUND_S + ROUND_S)
    assert {node.node_id for node in fleet.turns} == {"slow"}
    fleet.turns.clear()
    fleet.activation.had_turn("7-0", "slow", fleet.now)
    fleet.now += 25.0
    fleet.activation.came_late("slow", "7-0", TOKENS, 25.0, fleet.now)
    fleet.go_on(TRIAL_S + ROUND_S)
    assert fleet.told["slow"] is StandbyReason.TOO_SLOW and not fleet.node("slow").proven
    assert not fleet.turns, "it had its turn, so it is not asked again every few seconds"
