"""Leases that a node holds: examples by hand, then a random walk in which every rollout must end exactly once."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_node.core.held import MAX_DEATHS, SUSPECT_DEATHS, HeldLeases, Unfinished
from echo_shared.wire.messages import Lease
from tests.echo_node.core.loop_parts import lease


def loaded(version_for: Callable[[Lease], int | None]) -> Any:
    """Return a stand-in for the node's policy versions. `version_for` names the version that samples a lease."""
    return SimpleNamespace(version_for=version_for)


EVERYTHING = loaded(lambda wanted: wanted.policy_version)
BASE_ALONE = loaded(lambda wanted: None if wanted.policy_version else 0)


def holding(*lease_ids: int) -> HeldLeases:
    held = HeldLeases()
    for lease_id in lease_ids:
        held.take(lease(lease_id), {0, 1}, 0.0)
    return held


def started(held: HeldLeases) -> list[int]:
    return [request.lease_id for request in held.start(EVERYTHING)]


def ids(unfinished: Iterable[Unfinished]) -> list[int]:
    return [one.lease_id for one in unfinished]


def test_a_lease_is_held_until_its_last_rollout_is_finished() -> None:
    held = HeldLeases()
    held.take(lease(1, version=3, count=4), {0, 2}, 0.0)
    assert (held.num_rollouts, held.versions, ids_of(held)) == (2, {3}, [1])
    assert held.holds(1) and not held.holds(7)
    assert held.finish(1, 0) and not held.finish(1, 0) and not held.finish(1, 1) and not held.finish(7, 0)
    assert held.num_rollouts == 1
    assert held.finish(1, 2)
    assert (held.num_rollouts, held.versions, ids_of(held)) == (0, frozenset(), [])


def ids_of(held: HeldLeases) -> list[int]:
    return [one.lease_id for one in held.leases]


def test_a_request_covers_pending_rollouts_and_starts_once() -> None:
    held = HeldLeases()
    held.take(lease(1, version=3, count=4), {3, 1}, 0.0)
    assert held.start(loaded(lambda wanted: None)) == [] and not held.any_running
    (request,) = held.start(EVERYTHING)
    assert (request.lease_id, request.indices, request.policy_version, request.seed) == (1, (1, 3), 3, 9)
    assert held.any_running and started(held) == []


def test_an_interruptible_lease_restarts_with_a_newer_version() -> None:
    held = HeldLeases()
    held.take(interruptible(lease(1, version=3)), {0, 1}, 0.0)
    held.take(lease(2, version=3), {0}, 0.0)
    assert held.versions == {3} and held.interruptible(9) == [], "the first lease has not begun"
    assert [request.policy_version for request in held.start(loaded(lambda wanted: 4))] == [4, 4]
    assert held.versions == {4} and held.running_by(1) == 4 and held.interruptible(4) == []
    ((found, pending),) = held.interruptible(5)
    assert (found.lease_id, pending) == (1, {0, 1})
    held.move(1)
    assert held.is_moving(1) and held.is_running(1) and held.interruptible(5) == []
    held.stopped(1)
    assert not held.is_moving(1) and not held.is_moving(7) and held.running_by(1) is None
    (request,) = held.start(loaded(lambda wanted: 5))
    assert (request.lease_id, request.policy_version) == (1, 5)
    held.move(1)
    held.engine_ended()
    assert not held.is_moving(1)


def interruptible(wanted: Lease) -> Lease:
    return wanted.model_copy(update={"on_new_version": "interrupt"})


def test_a_released_lease_lists_its_missing_rollouts() -> None:
    held = holding(1, 2)
    held.start(EVERYTHING)
    held.finish(1, 0)
    held.stopped(2)
    held.stopped(7)
    assert held.let_go(1, "why") == [Unfinished(lease_id=1, indices=(1,), reason="why", was_running=True)]
    assert held.let_go(1, "why") == []
    assert held.let_go_all("all") == [Unfinished(lease_id=2, indices=(0, 1), reason="all", was_running=False)]
    assert held.leases == ()


def test_deadlines() -> None:
    held = HeldLeases()
    held.take(lease(1, deadline_s=10.0), {0}, 0.0)
    held.start(EVERYTHING)
    held.take(lease(2, deadline_s=10.0), {0}, 0.0)
    assert held.overdue(10.0) == []
    assert held.overdue(10.1) == [2], "a running lease has as long again"
    held.let_go(2, "late")
    assert held.renew(lease(1, deadline_s=10.0), 15.0) and not held.renew(lease(2), 15.0)
    assert held.overdue(35.0) == []
    assert held.overdue(35.1) == [1]
    assert held.is_running(1) and not held.is_running(2)


def test_an_engine_end_without_blame_costs_no_lease() -> None:
    held = holding(1, 2)
    for _ in range(2 * MAX_DEATHS):
        assert started(held) == [1, 2]
        held.engine_ended()


def test_suspect_leases_run_one_at_a_time_and_the_guilty_one_is_returned() -> None:
    held = holding(1, 2)
    for _ in range(SUSPECT_DEATHS):
        assert started(held) == [1, 2]
        assert held.engine_died("crashed") == []
    held.take(lease(3), {0, 1}, 0.0)
    assert started(held) == [1] and started(held) == []
    (gone,) = held.engine_died("crashed")
    assert gone == Unfinished(
        lease_id=1, indices=(0, 1), reason="the sampling engine died 3 times on it: crashed", was_running=False
    )
    assert started(held) == [2]
    assert held.finish(2, 0) and held.finish(2, 1)
    assert started(held) == [3]


def test_a_suspect_without_its_version_blocks_other_leases() -> None:
    held = HeldLeases()
    held.take(lease(1, version=1), {0}, 0.0)
    for _ in range(SUSPECT_DEATHS):
        held.start(EVERYTHING)
        held.engine_died("crashed")
    held.take(lease(2), {0}, 0.0)
    assert held.start(BASE_ALONE) == []


def test_a_lease_is_taken_once_and_never_empty() -> None:
    held = holding(1)
    with pytest.raises(AssertionError):
        held.take(lease(1), {0}, 0.0)
    with pytest.raises(AssertionError):
        held.take(lease(2), set(), 0.0)


STEPS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4), st.integers(0, 2)), max_size=60)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_every_rollout_leaves_once(steps: list[tuple[int, int, int]]) -> None:
    held, now, taken, left = HeldLeases(), 0.0, 0, 0
    for kind, a, b in steps:
        now += 0.5
        unfinished: list[Unfinished] = []
        if kind == 0 and a not in ids_of(held):
            held.take(lease(a, count=b + 1, deadline_s=5.0), set(range(b + 1)), now)
            taken += b + 1
        elif kind in (1, 2):
            left += held.finish(a, b)
        elif kind == 3:
            held.start(BASE_ALONE)
        elif kind == 4:
            unfinished = held.engine_died("crashed")
            assert not held.any_running
        elif kind == 5:
            unfinished = held.let_go(a, "no")
        elif kind == 6:
            unfinished = [one for lease_id in held.overdue(now) for one in held.let_go(lease_id, "late")]
            assert held.overdue(now) == []
        elif kind == 7 and b == 0:
            unfinished = held.let_go_all("all")
        elif kind == 8:
            held.renew(lease(a, deadline_s=5.0), now)
        assert all(one.indices for one in unfinished)
        left += sum(len(one.indices) for one in unfinished)
        assert held.num_rollouts == taken - left
