"""Leases that a node holds: examples by hand, then a random walk in which every rollout must end exactly once."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_node.core.held import MAX_DEATHS, SUSPECT_DEATHS, HeldLeases, Unfinished
from echo_node.core.placing import Seats
from echo_shared.sampling.interface import GroupRequest
from echo_shared.wire.messages import Lease
from tests.echo_node.core.loop_parts import lease


def loaded(version_for: Callable[[Lease], int | None]) -> Any:
    """Return a stand-in for the node's policy versions. All its engines hold the same versions."""
    return SimpleNamespace(version_for=lambda wanted, _: version_for(wanted))


EVERYTHING = loaded(lambda wanted: wanted.policy_version)
BASE_ALONE = loaded(lambda wanted: None if wanted.policy_version else 0)


def holding(*lease_ids: int) -> HeldLeases:
    held = HeldLeases()
    for lease_id in lease_ids:
        held.take(lease(lease_id), {0, 1}, 0.0)
    return held


def start(held: HeldLeases, policies: Any = EVERYTHING) -> list[GroupRequest]:
    """Start all that a node's only engine can start."""
    sole = Seats(device="", width=4, window=float("inf"), rate=1.0)
    return [placed.request for placed in held.start(policies, [sole])]


def started(held: HeldLeases) -> list[int]:
    return [request.lease_id for request in start(held)]


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
    assert start(held, loaded(lambda wanted: None)) == [] and not held.any_running
    (request,) = start(held)
    assert (request.lease_id, request.indices, request.policy_version, request.seed) == (1, (1, 3), 3, 9)
    assert held.any_running and started(held) == []


def test_an_interruptible_lease_restarts_with_a_newer_version() -> None:
    held = HeldLeases()
    held.take(interruptible(lease(1, version=3)), {0, 1}, 0.0)
    held.take(lease(2, version=3), {0}, 0.0)
    assert held.versions == {3} and held.interruptible(9, "") == [], "the first lease has not begun"
    assert [request.policy_version for request in start(held, loaded(lambda wanted: 4))] == [4, 4]
    assert held.versions == {4} and held.versions_on(1) == {4} and held.interruptible(4, "") == []
    ((found, pending),) = held.interruptible(5, "")
    assert (found.lease_id, pending) == (1, {0, 1})
    held.stop_on(1, "")
    assert held.is_stopping("") and held.devices(1) == {""} and held.interruptible(5, "") == []
    held.confirmed(1, "")
    held.confirmed(7, "")
    assert not held.is_stopping("") and not held.devices(7) and held.versions_on(1) == set()
    (request,) = start(held, loaded(lambda wanted: 5))
    assert (request.lease_id, request.policy_version) == (1, 5)
    held.stop_on(1, "")
    held.engine_ended("")
    assert not held.is_stopping("") and not held.any_running


def interruptible(wanted: Lease) -> Lease:
    return wanted.model_copy(update={"on_new_version": "interrupt"})


def test_a_released_lease_lists_its_missing_rollouts() -> None:
    held = holding(1, 2)
    start(held)
    held.finish(1, 0)
    held.stopped(2, "")
    held.stopped(7, "")
    assert held.let_go(1, "why") == [Unfinished(lease_id=1, indices=(1,), reason="why", running_on=("",))]
    assert held.let_go(1, "why") == []
    assert held.let_go_all("all") == [Unfinished(lease_id=2, indices=(0, 1), reason="all", running_on=())]
    assert held.leases == ()


def test_a_leaving_lease_does_not_start_again() -> None:
    held = HeldLeases()
    held.take(lease(1, count=2), {0, 1}, 0.0)
    seats = [Seats(device=device, width=1, window=1.0, rate=1.0) for device in ("cuda:0", "cuda:1")]
    assert [placed.device for placed in held.start(EVERYTHING, seats)] == ["cuda:0", "cuda:1"]
    held.stop_on(1, "cuda:0")
    assert held.stop(1) == ["cuda:1"], "the other engine has been told"
    held.confirmed(1, "cuda:0")
    assert held.start(EVERYTHING, seats) == []
    assert held.let_go(1, "why") == [Unfinished(lease_id=1, indices=(0, 1), reason="why", running_on=())]


def test_deadlines() -> None:
    held = HeldLeases()
    held.take(lease(1, deadline_s=10.0), {0}, 0.0)
    start(held)
    held.take(lease(2, deadline_s=10.0), {0}, 0.0)
    assert held.overdue(10.0) == []
    assert held.overdue(10.1) == [2], "a running lease has as long again"
    held.let_go(2, "late")
    assert held.renew(lease(1, deadline_s=10.0), 15.0) and not held.renew(lease(2), 15.0)
    assert held.overdue(35.0) == []
    assert held.overdue(35.1) == [1]
    assert held.devices(1) and not held.devices(2)


def test_an_engine_end_without_blame_costs_no_lease() -> None:
    held = holding(1, 2)
    for _ in range(2 * MAX_DEATHS):
        assert started(held) == [1, 2]
        held.engine_ended("")


def test_suspect_leases_run_one_at_a_time_and_the_guilty_one_is_returned() -> None:
    held = holding(1, 2)
    for _ in range(SUSPECT_DEATHS):
        assert started(held) == [1, 2]
        assert held.engine_died("", "crashed") == []
    held.take(lease(3), {0, 1}, 0.0)
    assert started(held) == [1] and started(held) == []
    (gone,) = held.engine_died("", "crashed")
    assert gone == Unfinished(
        lease_id=1, indices=(0, 1), reason="the sampling engine died 3 times on it: crashed", running_on=()
    )
    assert started(held) == [2]
    assert held.finish(2, 0) and held.finish(2, 1)
    assert started(held) == [3]


def test_a_suspect_without_its_version_blocks_other_leases() -> None:
    held = HeldLeases()
    held.take(lease(1, version=1), {0}, 0.0)
    for _ in range(SUSPECT_DEATHS):
        start(held)
        held.engine_died("", "crashed")
    held.take(lease(2), {0}, 0.0)
    assert start(held, BASE_ALONE) == []


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
            start(held, BASE_ALONE)
        elif kind == 4:
            unfinished = held.engine_died("", "crashed")
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
