from __future__ import annotations

import pytest

from echo_hub.core.accounting.effects import CheckRollout, HastenChecks
from echo_hub.core.accounting.events import RolloutScored
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.core.trust.forgetting import Forgetting
from echo_hub.core.trust.under_check import UnderCheck


class Desk:
    """A run with one node whose rollouts have all arrived; those of the last lease have no scores yet."""

    def __init__(self, bench) -> None:
        self.bench = bench(groups_per_step=4)
        self.bench.node("a")
        leases = list(self.bench.leases.values())
        for lease in leases[:-1]:
            self.bench.deliver(lease)
        coordinator = self.bench.coordinator
        self.ledger, self.out = coordinator._ledger, coordinator._out
        forgetting, nodes = Forgetting(self.ledger), coordinator._nodes
        self.under_check = UnderCheck(None, ledger=self.ledger, nodes=nodes, forgetting=forgetting, out=self.out)
        self.node = nodes.get("a")
        self.leased = [f"{leases[-1].lease_id}-{index}" for index in leases[-1].indices]
        self.scored = [name for name in self.ledger.rollouts if name not in self.leased]

    def actions(self, kind) -> list:
        self.bench.effects = self.out.take()
        return self.bench.of(kind)


@pytest.fixture
def desk(bench) -> Desk:
    return Desk(bench)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_blocking_check_holds_its_rollout_until_it_is_answered(desk: Desk, is_blocking: bool) -> None:
    name = desk.scored[0]
    rollout, score = desk.ledger.rollouts[name], RolloutScored(rollout_id=name, reward=1.0)
    desk.under_check.begin(rollout, is_blocking=is_blocking)
    assert desk.actions(CheckRollout) == [CheckRollout(rollout_id=name, is_urgent=is_blocking)]
    assert rollout.is_checked and rollout.is_held is is_blocking and len(desk.under_check) == 1
    assert desk.node.unchecked == is_blocking
    assert desk.under_check.holds(score) is is_blocking
    check = desk.under_check.answered(name)
    assert check is not None and check.held == (score if is_blocking else None)
    assert not rollout.is_held and len(desk.under_check) == desk.node.unchecked == 0
    assert desk.under_check.answered(name) is None and not desk.under_check.holds(score)


def test_all_of_a_node_that_has_come_in_is_checked_and_blocks(desk: Desk) -> None:
    patient, urgent, *others = desk.scored
    desk.under_check.begin(desk.ledger.rollouts[patient], is_blocking=False)
    desk.under_check.begin(desk.ledger.rollouts[urgent], is_blocking=True)
    desk.actions(CheckRollout)
    desk.under_check.begin_all("a")
    assert [one.rollout_id for one in desk.actions(CheckRollout)] == others, "each rollout is checked once"
    assert len(desk.bench.of(HastenChecks)) == 1, "one check no longer waits for a batch"
    assert all(desk.ledger.rollouts[name].is_held for name in desk.scored)
    desk.under_check.begin_all("a")
    assert not desk.actions(CheckRollout) and not desk.bench.of(HastenChecks)
    assert not any(desk.ledger.rollouts[name].is_checked for name in desk.leased)


def test_the_number_of_a_nodes_checks_that_wait_for_a_batch_is_bounded(desk: Desk) -> None:
    def hastened(rollout_id: str, *, is_blocking: bool = False) -> int:
        desk.under_check.begin(desk.ledger.rollouts[rollout_id], is_blocking=is_blocking, patience=1)
        return len(desk.actions(HastenChecks))

    first, second, third = desk.scored[:3]
    assert [hastened(first), hastened(second), hastened(third)] == [0, 1, 0]
    desk.under_check.answered(third)
    assert [hastened(first), hastened(second, is_blocking=True)] == [0, 0], "an urgent check does not wait"
    assert hastened(third) == 1


def test_of_another_node_nothing_is_checked(desk: Desk) -> None:
    desk.under_check.begin_all("b")
    assert not desk.actions(CheckRollout) and len(desk.under_check) == 0


def test_the_hubs_own_rollouts_are_not_checked(desk: Desk) -> None:
    rollout = desk.ledger.rollouts[desk.scored[0]]
    assert desk.under_check.can_check(rollout)
    rollout.node_id = HUB_NODE_ID
    assert not desk.under_check.can_check(rollout)
