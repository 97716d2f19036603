"""The coordinator prepares groups as early as the staleness bound allows, and opens them in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from echo_hub.core.accounting.effects import GroupOpened, PrepareGroup, SendLease
from echo_hub.core.accounting.events import GroupPrepared, StepDone, VersionPublished
from echo_hub.core.nodes.node import HUB_NODE_ID

BenchOf = Callable[..., Any]


def test_a_new_run_prepares_what_the_bound_allows(bench: BenchOf) -> None:
    b = bench(max_staleness=1, prepare=False)
    assert b.effects == [PrepareGroup(group_id=group_id) for group_id in range(4)]
    assert b.coordinator.status().groups_preparing == 4


def test_groups_are_opened_in_order_even_if_prepared_out_of_order(bench: BenchOf) -> None:
    b = bench(max_staleness=1, prepare=False)
    b.tell(GroupPrepared(group_id=1, seed=11), GroupPrepared(group_id=3, seed=13))
    assert b.effects == []
    b.tell(GroupPrepared(group_id=0, seed=10))
    assert b.of(GroupOpened) == [GroupOpened(group_id=0, seed=10), GroupOpened(group_id=1, seed=11)]
    b.tell(GroupPrepared(group_id=0, seed=10), GroupPrepared(group_id=77, seed=1))
    assert b.effects == [], "a repeated group, and one that was never requested"


@pytest.mark.parametrize("mode", ["sequential", "colocated"])
def test_in_lock_step_the_next_steps_groups_are_ready_when_the_version_is(bench: BenchOf, mode: str) -> None:
    """Lock-step modes prepare the next groups during the step, so that leases go out together with the new version.
    After the last step nothing is prepared.
    """
    b = bench(mode=mode, groups_per_step=2, steps=2)
    b.node("a" if mode == "sequential" else HUB_NODE_ID)
    b.learner()
    asked = [effect.group_id for effect in b.prepared]
    assert asked == [0, 1, 2, 3] and {lease.group_id for lease in b.leases.values()} == {0, 1}
    assert b.coordinator.status().groups_preparing == 0, "groups that may not be opened yet are not counted as awaited"
    b.deliver_group(0)
    b.deliver_group(1)
    b.tell(StepDone(step=1, metrics={}))
    if mode == "sequential":
        assert b.of(SendLease) == []
        b.tell(VersionPublished(policy_version=1))
    assert [(type(effect), effect.group_id) for effect in b.effects if isinstance(effect, GroupOpened)] == [
        (GroupOpened, 2),
        (GroupOpened, 3),
    ]
    assert {(lease.group_id, lease.policy_version) for lease in b.of(SendLease)} == {(2, 1), (3, 1)}
    assert b.of(PrepareGroup) == []


def test_a_group_prepared_late_is_opened_when_it_comes(bench: BenchOf) -> None:
    b = bench(prepare=False, mode="sequential", groups_per_step=1, steps=2)
    b.node("a")
    b.learner()
    b.tell(GroupPrepared(group_id=1, seed=1))
    assert b.of(GroupOpened) == [] and b.coordinator.status().groups_preparing == 1
    b.tell(GroupPrepared(group_id=0, seed=0))
    assert [opened.group_id for opened in b.of(GroupOpened)] == [0]
    b.deliver_group(0)
    b.tell(StepDone(step=1, metrics={}), VersionPublished(policy_version=1))
    assert [opened.group_id for opened in b.of(GroupOpened)] == [1]
