"""A version is withdrawn (leased to no node any more) once nodes of two origins report it as unusable, unless a proven
node has used it. Tests of the rule alone, and in the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from echo_hub.core.accounting.effects import GroupDropped, SendLease
from echo_hub.core.accounting.events import (
    LeaseGivenBack,
    NodeReported,
    Tick,
    VersionUnusable,
)
from echo_hub.core.nodes.conduct import MAX_REST_S
from echo_hub.core.nodes.node import Node
from echo_hub.core.policy.usability import MOST_VOICES, Usability
from echo_shared.errors import LearnerError

BenchOf = Callable[..., Any]


def node(node_id: str, *, proven: bool = True, origin: str = "", quarantined: bool = False) -> Node:
    return Node(node_id, 1, proven=proven, origin=origin, quarantined=quarantined)


@pytest.fixture
def usability() -> Usability:
    return Usability()


def test_two_unlike_nodes_withdraw_a_version_that_none_has_used(usability: Usability) -> None:
    assert usability.refused(8, node("a")) == () and not usability.is_withdrawn(8)
    assert usability.refused(8, node("b")) == ("a", "b")
    assert usability.withdrawn == {8: "nodes of 2 invites or addresses cannot use it, and no node has sampled with it"}
    assert usability.refused(8, node("b")) == (), "node b has refused it before"
    assert usability.refused(8, node("c")) == ("c",)
    assert not usability.is_withdrawn(7)


def test_only_the_newest_reports_are_kept_if_their_number_is_limited() -> None:
    usability = Usability(most_versions=2)
    for version in (7, 8, 9):
        usability.refused(version, node("a"))
        usability.refused(version, node("b"))
    assert set(usability.withdrawn) == {8, 9}


def test_a_proven_node_tells_whether_a_version_can_be_used(usability: Usability) -> None:
    usability.drew(8, node("a", proven=False))
    assert usability.has_drawn(8) and not usability.has_drawn(7)
    usability.refused(8, node("b"))
    assert not usability.has_drawn(8)
    usability.drew(8, node("c"))
    assert usability.has_drawn(8)


@pytest.mark.parametrize(
    "others",
    [
        [node("a")] * 3,
        [node("b", origin="10.0.0.1"), node("c", origin="10.0.0.1")],
        [node("b", proven=False), node("c", proven=False)],
        [node("b", quarantined=True)],
    ],
)
def test_refusals_by_one_kind_of_node_withdraw_nothing(usability: Usability, others: list[Node]) -> None:
    usability.refused(8, node("a", origin="10.0.0.1"))
    assert [usability.refused(8, other) for other in others] == [()] * len(others)
    assert not usability.is_withdrawn(8)


def test_a_version_that_an_established_node_has_drawn_by_is_usable(usability: Usability) -> None:
    usability.refused(8, node("a")), usability.refused(8, node("b"))
    assert not usability.drew(8, node("c", proven=False)) and usability.is_withdrawn(8)
    assert usability.drew(8, node("c")) and not usability.is_withdrawn(8)
    assert usability.refused(8, node("d")) == () and not usability.is_withdrawn(8)
    assert not usability.drew(8, node("c")), "nothing new"


def test_before_any_node_is_established_all_are_heard(usability: Usability) -> None:
    usability.refused(1, node("a", proven=False)), usability.refused(1, node("b", proven=False))
    assert usability.is_withdrawn(1)
    assert usability.drew(1, node("c", proven=False)) and not usability.is_withdrawn(1)


def test_memory_is_bounded(usability: Usability) -> None:
    for number in range(MOST_VOICES + 2):
        usability.drew(8, node(f"n{number}"))
    assert len(usability._voices[8]) == MOST_VOICES
    usability.refused_by_hub(7, "not finite")
    usability.forget_before(9)
    assert not usability._voices and not usability.withdrawn


def refuse(b: Any, lease: SendLease, version: int | None = None) -> None:
    b.tell(
        LeaseGivenBack(
            node_id=lease.node_id,
            lease_id=lease.lease_id,
            indices=lease.indices,
            reason="An adapter holds a value that is not finite.",
            unusable_version=lease.policy_version if version is None else version,
        )
    )


def proven(bench: BenchOf, *node_ids: str, **settings: Any) -> Any:
    """Return a run in which each node returned leases of version 0, and now holds leases of the published version 1."""
    b = bench(**{"groups_per_step": 2, "group_size": 2, "steps": 9, "max_staleness": 4, **settings})
    b.learner()
    for node_id in node_ids:
        b.node(node_id, capacity=2)
    delivered = 0
    while b.coordinator.status().training_step is None:
        delivered += 1
        b.deliver(b.leases[delivered])
    b.train(1)
    for node_id in node_ids:
        b.tell(NodeReported(node_id=node_id, capacity=2, policy_version=1))
        while (held := newest(b, node_id)).policy_version == 0:
            b.deliver(held)
    return b


def newest(b: Any, node_id: str) -> SendLease:
    return max((lease for lease in b.leases.values() if lease.node_id == node_id), key=lambda lease: lease.lease_id)


def test_a_version_that_two_nodes_refuse_is_no_longer_leased(bench: BenchOf) -> None:
    b = proven(bench, "a", "b")
    first, second = newest(b, "a"), newest(b, "b")
    assert first.policy_version == second.policy_version == 1
    refuse(b, first)
    assert b.coordinator.status().withdrawn == {}
    refuse(b, second)
    assert list(b.coordinator.status().withdrawn) == [1]
    known = max(b.leases)
    for _ in range(40):
        b.now += MAX_REST_S / 16
        b.tell(Tick())
    after = [lease for number, lease in b.leases.items() if number > known]
    # After the withdrawal of version 1, leases name version 0 again, also leases of rollouts that a lease of version 1
    # had begun.
    assert after and {lease.policy_version for lease in b.of(SendLease) + after} == {0}
    assert b.of(GroupDropped) == []


def test_a_node_that_refused_a_withdrawn_version_does_not_rest(bench: BenchOf) -> None:
    b = proven(bench, "a", "b")
    first, second = newest(b, "a"), newest(b, "b")
    for lease in (first, second):
        refuse(b, lease)
    assert {lease.node_id for lease in b.of(SendLease)} == {"a", "b"}, "both get leases of version 0 at once"


@pytest.mark.parametrize("version", [0, 2, None])
def test_one_nodes_refusal_or_one_of_another_version_withdraws_nothing(bench: BenchOf, version: int | None) -> None:
    """Single refusals may be the node's own fault, so only a second node's refusal of the same version withdraws it.
    Here node b refuses another version than its lease's, or none.
    """
    b = proven(bench, "a", "b")
    refuse(b, newest(b, "a"))
    if version is not None:
        refuse(b, newest(b, "b"), version)
    assert b.coordinator.status().withdrawn == {}
    b.node("c", version=1)
    assert newest(b, "c").policy_version == 1


def test_a_rollout_sampled_with_a_withdrawn_version_makes_it_usable(bench: BenchOf) -> None:
    b = proven(bench, "a", "b", "c")
    good = newest(b, "c")
    for node_id in ("a", "b"):
        refuse(b, newest(b, node_id))
    assert list(b.coordinator.status().withdrawn) == [1]
    b.deliver(good)
    assert b.coordinator.status().withdrawn == {}


def test_the_next_version_is_leased_after_a_withdrawn_one(bench: BenchOf) -> None:
    b = proven(bench, "a", "b")
    for node_id in ("a", "b"):
        refuse(b, newest(b, node_id))
    b.now += MAX_REST_S
    b.tell(Tick())
    while b.coordinator.status().training_step is None:
        for node_id in ("a", "b"):
            b.deliver(newest(b, node_id))
    b.train(2)
    b.deliver(newest(b, "a"))
    assert newest(b, "a").policy_version == 2, (
        "node a has to fetch version 2 first, because its own version is unusable"
    )


def test_where_completions_are_interrupted_none_moves_on_to_a_withdrawn_version(bench: BenchOf) -> None:
    b = proven(bench, "a", "b", interrupts=True)
    assert newest(b, "a").may_move_on
    for node_id in ("a", "b"):
        refuse(b, newest(b, node_id))
    b.now += MAX_REST_S
    b.tell(Tick())
    assert (newest(b, "a").policy_version, newest(b, "a").may_move_on) == (0, False)


def test_in_lock_step_nothing_is_leased_by_a_withdrawn_version(bench: BenchOf) -> None:
    b = proven(bench, "a", "b", mode="sequential", max_staleness=0)
    for node_id in ("a", "b"):
        refuse(b, newest(b, node_id))
    known = max(b.leases)
    b.now += MAX_REST_S
    b.tell(Tick())
    assert list(b.coordinator.status().withdrawn) == [1] and max(b.leases) == known


def test_a_version_that_the_hub_finds_unusable_is_passed_over(bench: BenchOf) -> None:
    b = proven(bench, "a")
    for step in (2, 3):
        while b.coordinator.status().training_step is None:
            b.deliver(newest(b, "a"))
        b.train(step, publish=step == 3)
        if step == 2:
            b.tell(VersionUnusable(policy_version=2, reason="3 tensors hold values that are not finite"))
            status = b.coordinator.status()
            assert status.withdrawn == {2: "3 tensors hold values that are not finite"}
            assert status.published_version == newest(b, "a").policy_version == 1
    assert b.coordinator.status().published_version == 3


@pytest.mark.parametrize(("settings", "version"), [({"steps": 2}, 2), ({"mode": "sequential", "max_staleness": 0}, 2)])
def test_a_run_that_needs_the_version_stops_with_what_to_do(
    bench: BenchOf, settings: dict[str, Any], version: int
) -> None:
    b = bench(**{"groups_per_step": 1, "group_size": 2, "steps": 9, "max_staleness": 1, **settings})
    with pytest.raises(LearnerError, match="no engine can use") as raised:
        b.tell(VersionUnusable(policy_version=version, reason="not finite"))
    assert "backup" in (raised.value.do or "")
