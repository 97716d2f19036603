"""Admission by slots of sessions, and the order of leases of episodes that are sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from echo_hub.core.accounting.effects import GroupOpened, SendLease
from echo_hub.core.accounting.events import (
    EvaluationWanted,
    NodeDisconnected,
    NodeReported,
    RolloutContinued,
    RolloutRejected,
    SlotsChanged,
    Tick,
    VersionPublished,
)
from echo_hub.core.accounting.parameters import SessionRules
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.policy.leasing import SAME_NODE_S
from echo_shared.wire.messages import DropReason

BenchOf = Callable[..., Any]


def sessions(bench: BenchOf, slots: int | None, **settings: Any) -> Any:
    b = bench(session_rules=lambda group_id: SessionRules(), multi_turn=True, **settings)
    b.learner()
    if slots is not None:
        b.tell(SlotsChanged(slots=slots))
    return b


def opened(b: Any) -> list[int]:
    return [record.group_id for record in b.of(GroupOpened)]


@pytest.mark.parametrize(("slots", "expected"), [(None, []), (0, []), (1, [0]), (2, [0]), (3, [0]), (5, [0, 1])])
def test_groups_open_while_slots_are_free_and_one_in_any_case(
    bench: BenchOf, slots: int | None, expected: list[int]
) -> None:
    b = bench(session_rules=lambda group_id: SessionRules(), max_staleness=1)
    b.tell(*([] if slots is None else [SlotsChanged(slots=slots)]))
    assert opened(b) == expected
    status = b.coordinator.status()
    assert status.lacks_session_slots and status.session_slots == (slots or 0)
    assert status.session_slots_used == 2 * len(expected)


def test_the_next_group_opens_once_enough_episodes_have_ended(bench: BenchOf) -> None:
    b = sessions(bench, 4, group_size=3, groups_per_step=2)
    b.node("a", capacity=1)
    for left in (2, 1):
        b.deliver(b.of(SendLease)[0])
        assert opened(b) == ([1] if left == 1 else []), f"{left} episodes are left"


def test_groups_without_sessions_need_no_slot(bench: BenchOf) -> None:
    b = bench(session_rules=lambda group_id: SessionRules() if group_id else None)
    assert opened(b) == [0], "the second group waits"


def test_an_evaluation_gets_a_quarter_of_the_slots_and_leaves_training_its_group(bench: BenchOf) -> None:
    b = sessions(bench, None, evaluation_problems=6)
    b.tell(EvaluationWanted(policy_version=0))
    b.node("a")
    assert b.leases == {}
    b.tell(SlotsChanged(slots=8))
    kinds = [EvaluationGroup.of(lease.group_id) is not None for lease in b.leases.values()]
    assert kinds.count(True) == 2 and kinds.count(False) == 2
    first = next(lease for lease in b.leases.values() if EvaluationGroup.of(lease.group_id))
    b.deliver(first)
    (more,) = b.of(SendLease)
    assert EvaluationGroup.of(more.group_id) is not None, "its slot is used again"


def continued(rollout_id: str) -> RolloutContinued:
    return RolloutContinued(rollout_id=rollout_id, observation_ids=np.array([9], np.int32))


def test_later_turns_are_leased_before_first_turns_of_older_groups(bench: BenchOf) -> None:
    b = sessions(bench, 99)
    b.node("a", capacity=1)
    for number, (group_id, index) in enumerate([(0, 0), (0, 1), (1, 0)], 1):
        assert (b.leases[number].group_id, b.leases[number].indices) == (group_id, (index,))
        b.tell(b.arrival(b.leases[number], index))
    b.tell(continued("3-0"))
    b.tell(RolloutRejected(rollout_id="1-0", reason=DropReason.SCORER_FAILED, detail="no"))
    assert b.of(SendLease) == [], "the node is busy"
    b.tell(b.arrival(b.leases[4], 1))
    (lease,) = b.of(SendLease)
    assert (lease.group_id, lease.turn) == (1, 1), "the episode that holds a slot comes first"


def test_a_later_turn_goes_to_the_node_that_drew_the_turn_before(bench: BenchOf) -> None:
    b = sessions(bench, 99, groups_per_step=1)
    for name in ("a", "b"):
        b.node(name, capacity=1)
    b.node("c", capacity=9)
    first = list(b.leases.values())
    assert [lease.node_id for lease in first] == ["a", "b"]
    for lease in reversed(first):
        b.go_on(lease)
        (later,) = b.of(SendLease)
        assert (later.node_id, later.turn) == (lease.node_id, 1)


@pytest.fixture
def busy(bench: BenchOf) -> Any:
    """Return a run with two nodes: node a, which drew the first turn of an episode and is busy, and node b, which is
    idle.
    """
    b = sessions(bench, 99, groups_per_step=1)
    b.node("a", capacity=1)
    b.tell(b.arrival(b.leases[1], 0))
    b.node("b", capacity=1)
    assert [lease.node_id for lease in b.leases.values()] == ["a", "a"]
    return b


def test_a_later_turn_waits_shortly_for_the_node_that_drew_the_turn_before(busy: Any) -> None:
    busy.tell(continued("1-0"))
    assert busy.of(SendLease) == []
    assert busy.coordinator.due_at() == busy.now + SAME_NODE_S
    busy.now += SAME_NODE_S / 2
    busy.tell(busy.arrival(busy.leases[2], 1))
    (lease,) = busy.of(SendLease)
    assert (lease.node_id, lease.turn) == ("a", 1)


def test_the_wait_for_a_busy_node_ends(busy: Any) -> None:
    busy.tell(continued("1-0"))
    busy.now += SAME_NODE_S
    busy.tell(Tick())
    (lease,) = busy.of(SendLease)
    assert (lease.node_id, lease.turn) == ("b", 1)


@pytest.mark.parametrize("reason", ["it left", "it has another version"])
def test_no_turn_waits_for_a_node_without_the_conversations_keys(busy: Any, reason: str) -> None:
    if reason == "it left":
        busy.tell(NodeDisconnected(node_id="a"))
    else:
        busy.tell(VersionPublished(policy_version=1))
        busy.tell(NodeReported(node_id="a", capacity=1, policy_version=1))
    busy.tell(continued("1-0"))
    (lease,) = busy.of(SendLease)
    assert (lease.node_id, lease.turn) == ("b", 1)


def test_later_turns_of_evaluations_wait_for_their_node_too(bench: BenchOf) -> None:
    b = sessions(bench, 99, evaluation_problems=1, evaluation_samples=2, trains=False)
    b.tell(EvaluationWanted(policy_version=0))
    b.node("a", capacity=1)
    b.tell(b.arrival(b.leases[1], b.leases[1].indices[0]))
    b.node("b", capacity=9)
    rest = [lease for lease in b.leases.values() if lease.node_id == "b"]
    b.tell(continued(f"1-{b.leases[1].indices[0]}"))
    assert rest and b.of(SendLease) == []
    b.now += SAME_NODE_S
    b.tell(Tick())
    assert [(lease.node_id, lease.turn) for lease in b.of(SendLease)] == [("b", 1)]
