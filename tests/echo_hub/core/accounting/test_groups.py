from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from echo_hub.core.accounting.effects import GroupDropped, GroupOpened, RolloutsDropped, SendLease
from echo_hub.core.accounting.groups import GroupOwner, LeasedRollout, RolloutGroup, Slot, SortedIds, unlike_lease
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.nodes.node import Node
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.policy.leasing import Leasing
from echo_hub.core.policy.outstanding import OutstandingLeases
from echo_hub.core.settings import CoordinatorSettings
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import DropReason, FinishReason, ReceiptState
from tests.echo_hub.core.books import Books

SETTINGS = CoordinatorSettings(mode="async", steps=1, groups_per_step=1, group_size=2, deadline_s=60.0)


class Checking:
    """Stand-in for a group's owner that neither trains nor evaluates. A group's seed serves as its leases' version, and
    a group is dropped when one of its episodes ends."""

    for_learner = False
    keeps_payloads = False
    lengths = None
    may_move_on = False

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.wanting = SortedIds()
        self.checked: list[float | None] = []

    def lease_version(self, group: RolloutGroup, node: Node) -> int:
        return group.seed

    def preferred(self, group: RolloutGroup) -> tuple[str, ...]:
        return ()

    def end_episode(self, rollout: LeasedRollout, reward: float) -> None:
        self.checked.append(reward)
        self.ledger.drop_group(self.ledger.groups[rollout.group_id], DropReason.REVOKED)

    def scorer_failed(self, rollout: LeasedRollout, detail: str) -> None:
        self.checked.append(None)
        self.ledger.fail(rollout, DropReason.SCORER_FAILED, detail)

    def returned_too_often(self, group: RolloutGroup) -> None:
        self.ledger.drop_group(group, DropReason.RETURNED)

    def end_run(self) -> None:
        for group in list(self.ledger.groups.values()):
            self.ledger.drop_group(group, DropReason.RUN_ENDED)


def ledger(out: Outbox | None = None) -> tuple[Ledger, Nodes]:
    nodes = Nodes(SETTINGS.nodes)
    return Ledger(nodes=nodes, out=out or Outbox()), nodes


OWNER: GroupOwner = Checking(ledger()[0])


def rollout(version: int, *, overdue: bool = False, reward: float | None = None) -> LeasedRollout:
    return LeasedRollout("1-0", 1, "a", 0, 0, version, 0, ReceiptState.LEASED, 0, reward, overdue=overdue)


def test_a_slot_wants_a_lease_unless_a_node_works_on_it_in_time() -> None:
    assert Slot().wants_lease
    assert not Slot(leased=(rollout(0),)).wants_lease
    assert Slot(leased=(rollout(0, overdue=True),)).wants_lease
    late = rollout(0)
    late.late = True
    assert Slot(leased=(late, rollout(0, overdue=True))).wants_lease
    assert not Slot(leased=(rollout(0, overdue=True), rollout(0))).wants_lease
    assert not Slot(winner=rollout(0)).wants_lease
    assert Slot(turns=(rollout(0),)).wants_lease


def test_a_slot_knows_its_turn() -> None:
    assert Slot().turn == 0
    first, second = rollout(0), rollout(1)
    assert Slot(turns=(first,), winner=second).turn == 1
    assert Slot(turns=(first,), winner=second).received == (first, second)
    assert Slot(turns=(first,)).received == (first,)


def test_a_group_lists_its_received_and_leased_rollouts() -> None:
    group = RolloutGroup(0, 1, [Slot(), Slot(leased=(rollout(1),)), Slot()], OWNER)
    group.slots[0].winner, group.slots[2].winner = rollout(7), rollout(5)
    group.slots[2].turns = (rollout(4),)
    assert [each.policy_version for each in group.received] == [7, 4, 5]
    assert [leased.policy_version for leased in group.still_leased] == [1]
    assert not group.complete


def test_only_unequal_rewards_give_a_group_an_advantage() -> None:
    slots = [Slot(winner=rollout(0, reward=0.5)), Slot(winner=rollout(0, reward=0.5))]
    group = RolloutGroup(0, 1, slots, OWNER, num_ended=2)
    assert group.complete and not group.has_advantage()
    assert slots[1].winner is not None
    slots[1].winner.reward = 0.25
    assert group.has_advantage()
    slots[1].winner.reward = 0.5 + 1e-12
    assert not group.has_advantage(), "a rounding error is not an advantage"


def test_turns_may_have_an_advantage_even_if_episodes_have_none() -> None:
    slots = [Slot(turns=(rollout(0),), winner=rollout(0, reward=0.5)) for _ in range(2)]
    group = RolloutGroup(0, 1, [*slots, Slot(winner=rollout(0, reward=0.5))], OWNER, num_ended=3)
    assert not group.has_advantage(discount=1.0)
    assert group.has_advantage(discount=0.9), "one episode gets its reward a turn earlier"
    slots[0].turns[0].turn_reward = 0.25
    assert group.has_advantage(discount=1.0) and not group.has_advantage()
    slots[1].turns[0].turn_reward = 0.25
    assert not group.has_advantage(discount=1.0)


def test_a_further_kind_of_owner_takes_one_class() -> None:
    out = Outbox()
    books, nodes = ledger(out)
    checking = Checking(books)
    outstanding = OutstandingLeases(ledger=books, nodes=nodes, out=out)
    leasing = Leasing(SETTINGS, ledger=books, nodes=nodes, outstanding=outstanding, beside=[checking], next_lease_id=1)
    nodes.connect("a")
    nodes.report("a", 8, 0)
    for group_id, version in ((100, 5), (101, 6)):
        books.open_group(RolloutGroup(group_id, version, [Slot(), Slot()], checking))
    leasing.dispatch_beside(0.0, within_share=True)
    assert out.take() == [], "its share has nothing for it yet"
    leasing.dispatch_beside(0.0, within_share=False)
    effects = out.take()
    leases = [effect for effect in effects if isinstance(effect, SendLease)]
    assert [(lease.group_id, lease.policy_version) for lease in leases] == [(100, 5), (101, 6)]
    assert len(books.waiting) == len(checking.wanting) == 0

    payload = RolloutPayload(
        completion_ids=np.array([1], np.int32),
        behavior_logprobs=np.array([-1.0], np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.1,
    )
    for rollout_id in ("1-0", "2-0"):
        books.receive(books.rollouts[rollout_id], payload, 1.0)
    books.groups[100].owner.end_episode(books.rollouts["1-0"], 0.5)
    books.groups[101].owner.scorer_failed(books.rollouts["2-0"], "why")
    assert (checking.checked, list(books.groups), list(checking.wanting.first(9))) == (
        [0.5, None],
        [101],
        [101],
    )
    checking.end_run()
    effects += out.take()
    assert not [effect for effect in effects if isinstance(effect, GroupOpened | GroupDropped)]
    reasons = [effect.reason for effect in effects if isinstance(effect, RolloutsDropped)]
    assert set(reasons) == {DropReason.REVOKED, DropReason.SCORER_FAILED, DropReason.RUN_ENDED}
    assert (books.groups, books.rollouts, nodes.held_by_node) == ({}, {}, {})


def test_sorted_ids() -> None:
    ids = SortedIds([5, 1])
    for group_id in (3, 3, 9):
        ids.add(group_id)
    ids.discard(5)
    ids.discard(6)
    assert (len(ids), ids[0], ids.first(2), ids.position(9)) == (3, 1, (1, 3), 2)
    assert 3 in ids and 5 not in ids and 100 not in ids


def test_many_ids_go_in_one_pass() -> None:
    ids = SortedIds(range(10))
    ids.discard_all((3, 4, 99))
    assert ids.first(9) == (0, 1, 2, 5, 6, 7, 8, 9)


def test_wanting_follows_every_change() -> None:
    books = Books()
    ledger = books.ledger
    books.open(0)
    assert ledger.groups[0].unleased == {0, 1} and 0 in books.wanting
    books.lease(0, 0)
    assert ledger.groups[0].unleased == {1}
    books.lease(0, 1)
    assert 0 not in books.wanting
    ledger.expire(ledger.rollouts["1-0"], 0.0)
    assert ledger.groups[0].unleased == {0} and 0 in books.wanting
    books.receive("1-0", score=False)
    assert 0 not in books.wanting
    ledger.drop([ledger.rollouts["1-0"]], DropReason.INVALID)
    assert ledger.groups[0].unleased == {0} and 0 in books.wanting
    assert books.nodes.held_by_node == {"a": 1}


def test_a_group_without_requests_wants_nothing() -> None:
    books = Books()
    books.open(0)
    group = books.ledger.groups[0]
    group.asked_for = False
    books.ledger.wants.settle(group, 0)
    num_changes = books.ledger.wants.num_changes
    books.ledger.wants.note(group, 0)
    assert group.unleased == {1} and books.ledger.wants.num_changes == num_changes
    books.ledger.ask_for(group)
    assert group.unleased == {0, 1} and books.ledger.wants.num_changes == num_changes + 1


FOR_LEARNER: Any = SimpleNamespace(for_learner=True)
BESIDE: Any = SimpleNamespace(for_learner=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"problem": "its beginning differs"}, "its beginning differs"),
        ({"lease_id": 99}, "lease 99 instead of 1"),
        ({"group_id": 7, "index": 5}, "group 7 instead of 0, index 5 instead of 0"),
        ({"policy_version_end": 3}, "last policy version 3 instead of 0"),
    ],
)
def test_contradictions_with_the_lease_are_named(bench: Callable[..., Any], changes: dict[str, Any], said: str) -> None:
    b = bench()
    b.node("a")
    rollout = b.coordinator._ledger.rollouts["1-0"]
    event = replace(b.arrival(b.leases[1], 0), **changes)
    assert unlike_lease(event, rollout, owner=FOR_LEARNER, newest=None) == said


def test_only_training_rollouts_may_continue_with_a_newer_version(bench: Callable[..., Any]) -> None:
    b = bench()
    b.node("a")
    rollout = b.coordinator._ledger.rollouts["1-0"]
    event = replace(b.arrival(b.leases[1], 0), policy_version_end=2)
    assert unlike_lease(event, rollout, owner=FOR_LEARNER, newest=2) == ""
    assert "newest published 1" in unlike_lease(event, rollout, owner=FOR_LEARNER, newest=1)
    assert unlike_lease(event, rollout, owner=BESIDE, newest=2) == "last policy version 2 instead of 0"
