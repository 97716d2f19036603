from __future__ import annotations

from echo_hub.core.groups import LeasedRollout, RolloutGroup, Slot
from echo_shared.messages import ReceiptState


def rollout(version: int, *, overdue: bool = False, reward: float | None = None) -> LeasedRollout:
    return LeasedRollout("1-0", 1, "a", 0, 0, version, 0, ReceiptState.LEASED, 0, reward, overdue)


def test_a_slot_wants_a_lease_unless_somebody_works_on_it_in_time() -> None:
    assert Slot().wants_lease
    assert not Slot(leased=(rollout(0),)).wants_lease
    assert Slot(leased=(rollout(0, overdue=True),)).wants_lease
    assert not Slot(leased=(rollout(0, overdue=True), rollout(0))).wants_lease
    assert not Slot(winner=rollout(0)).wants_lease
    assert Slot(turns=(rollout(0),)).wants_lease


def test_a_slot_knows_its_turn() -> None:
    assert Slot().turn == 0
    first, second = rollout(0), rollout(1)
    assert Slot(turns=(first,), winner=second).turn == 1
    assert Slot(turns=(first,), winner=second).received == (first, second)
    assert Slot(turns=(first,)).received == (first,)


def test_a_group_is_as_old_as_its_oldest_received_rollout() -> None:
    group = RolloutGroup(0, 1, [Slot(), Slot(leased=(rollout(1),)), Slot()])
    assert group.oldest_version is None
    group.slots[0].winner, group.slots[2].winner = rollout(7), rollout(5)
    group.slots[2].turns = (rollout(4),)
    assert group.oldest_version == 4
    assert [each.policy_version for each in group.received] == [7, 4, 5]
    assert [leased.policy_version for leased in group.still_leased] == [1]
    assert not group.complete


def test_whether_a_group_has_an_advantage() -> None:
    slots = [Slot(winner=rollout(0, reward=0.5)), Slot(winner=rollout(0, reward=0.5))]
    group = RolloutGroup(0, 1, slots, num_ended=2)
    assert group.complete and not group.has_advantage
    assert slots[1].winner is not None
    slots[1].winner.reward = 0.25
    assert group.has_advantage
    slots[1].winner.reward = 0.5 + 1e-12
    assert not group.has_advantage, "rounding is none"
