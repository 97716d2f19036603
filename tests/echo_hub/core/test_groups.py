from __future__ import annotations

from echo_hub.core.groups import LeasedRollout, RolloutGroup, Slot
from echo_shared.messages import ReceiptState


def rollout(version: int, *, overdue: bool = False) -> LeasedRollout:
    return LeasedRollout("1-0", 1, "a", 0, 0, version, ReceiptState.LEASED, overdue)


def test_a_slot_wants_a_lease_unless_somebody_works_on_it_in_time() -> None:
    assert Slot().wants_lease
    assert not Slot(leased=(rollout(0),)).wants_lease
    assert Slot(leased=(rollout(0, overdue=True),)).wants_lease
    assert not Slot(leased=(rollout(0, overdue=True), rollout(0))).wants_lease
    assert not Slot(winner=rollout(0)).wants_lease


def test_a_group_is_as_old_as_its_oldest_received_rollout() -> None:
    group = RolloutGroup(0, 1, [Slot(), Slot(leased=(rollout(1),)), Slot()])
    assert group.oldest_version is None
    group.slots[0].winner, group.slots[2].winner = rollout(7), rollout(5)
    assert group.oldest_version == 5
    assert [winner.policy_version for winner in group.winners] == [7, 5]
    assert [leased.policy_version for leased in group.still_leased] == [1]
    assert not group.complete
