from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_hub.core.capacity.advice import (
    HUNDREDTH,
    Mix,
    Placement,
    advise,
    busy_share,
    by_shorter_leases,
    cheapest_to_add,
    farthest_by_nodes,
    farthest_by_staleness,
    nodes_to_add,
    place,
    reaches,
    smallest_interval,
    smallest_staleness,
    times_as_many,
)
from echo_hub.core.capacity.model import NodeClass, Pool, Workload

WORKLOAD = Workload(mode="async", rollouts_per_step=32, train_s=1.0, broadcast_s=0.25, max_staleness=4)
CHEAP = NodeClass(name="cheap", count=4, rollouts_per_s=4.0, latency_s=0.2, cost_per_h=0.2)
QUICK = NodeClass(name="quick", count=2, rollouts_per_s=9.0, latency_s=0.1, cost_per_h=0.9)
GIFT = NodeClass(name="gift", count=3, rollouts_per_s=1.0, latency_s=0.5)


def test_nodes_that_are_missing() -> None:
    pool = Pool.of([CHEAP])
    assert nodes_to_add(WORKLOAD, pool, CHEAP, 1.0) == 4
    assert nodes_to_add(WORKLOAD, pool, QUICK, 1.0) == 2
    assert nodes_to_add(WORKLOAD, pool, QUICK, 0.5) == 0
    assert nodes_to_add(WORKLOAD, pool, replace(QUICK, latency_s=99.0), 1.0) is None
    assert times_as_many(WORKLOAD, [CHEAP], 1.0) == pytest.approx(2.0, abs=0.02)
    assert times_as_many(WORKLOAD, [], 1.0) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 6), st.floats(0.1, 12.0), st.floats(0.0, 2.0), st.floats(0.4, 1.0))
def test_the_advised_number_reaches_the_goal_and_one_less_does_not(
    bound: int, rate: float, latency: float, target: float
) -> None:
    workload = replace(WORKLOAD, max_staleness=bound)
    kind, pool = NodeClass(name="n", count=1, rollouts_per_s=rate, latency_s=latency), Pool.of([GIFT])
    number = nodes_to_add(workload, pool, kind, target)
    if number:
        assert reaches(workload, pool.plus(replace(kind, count=number)), target)
        assert not reaches(workload, pool.plus(replace(kind, count=number - 1)), target)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 6), st.floats(0.1, 12.0), st.floats(0.0, 40.0))
def test_no_number_of_nodes_exceeds_the_advised_one(bound: int, rate: float, latency: float) -> None:
    workload = replace(WORKLOAD, max_staleness=bound)
    kind, pool = NodeClass(name="n", count=1, rollouts_per_s=rate, latency_s=latency), Pool.of([GIFT])
    found = farthest_by_nodes(workload, pool, kind)
    assert found.busy == busy_share(workload, pool.plus(replace(kind, count=found.amount)))
    for count in (0, 1, 16, 1_024):
        assert busy_share(workload, pool.plus(replace(kind, count=count))) <= found.busy + HUNDREDTH + 1e-9
    if found.amount:
        fewer = busy_share(workload, pool.plus(replace(kind, count=found.amount - 1)))
        assert fewer < found.busy


def test_how_far_a_larger_bound_and_shorter_leases_get() -> None:
    late = Pool.of([replace(CHEAP, count=9, latency_s=9.0)])
    workload = replace(WORKLOAD, max_staleness=1)
    found = farthest_by_staleness(workload, late)
    assert found is not None and found.busy == busy_share(replace(workload, max_staleness=found.amount), late)
    assert busy_share(workload, late) < found.busy < 1 and busy_share(workload, late) < by_shorter_leases(
        workload, late
    )
    assert farthest_by_staleness(replace(workload, max_staleness=6), late) is None
    assert farthest_by_staleness(replace(workload, mode="sequential", max_staleness=0), late) is None


def test_a_bound_that_hides_the_broadcast() -> None:
    pool = Pool.of([replace(CHEAP, count=9)])
    assert smallest_staleness(replace(WORKLOAD, max_staleness=0), pool, 1.0) == 2
    assert smallest_staleness(replace(WORKLOAD, broadcast_s=1.9, publish_every=2), pool, 1.0) == 4
    assert smallest_staleness(WORKLOAD, Pool.of([CHEAP]), 1.0) is None, "no bound makes up for missing nodes"
    assert smallest_staleness(replace(WORKLOAD, mode="sequential"), pool, 1.0) is None


def test_versions_far_enough_apart_to_be_sent() -> None:
    pool = Pool.of([replace(CHEAP, count=9)])
    assert smallest_interval(WORKLOAD, pool, 1.0) == 1
    assert smallest_interval(replace(WORKLOAD, broadcast_s=1.9), pool, 1.0) == 2
    assert smallest_interval(replace(WORKLOAD, broadcast_s=1.9, mode="sequential"), pool, 1.0) is None


def test_the_cheapest_to_add() -> None:
    assert cheapest_to_add(WORKLOAD, Pool.of([CHEAP]), [QUICK, CHEAP], 1.0) == Mix(
        counts=(("cheap", 4),), cost_per_h=pytest.approx(0.8)
    )
    dear = replace(QUICK, cost_per_h=0.3)
    found = cheapest_to_add(WORKLOAD, Pool.of([GIFT]), [dear, replace(CHEAP, cost_per_h=0.15)], 1.0)
    assert found is not None
    assert found.counts == (("quick", 3), ("cheap", 1)), "3 + 27 + 4 is enough, and cheaper than a fourth quick node"
    assert cheapest_to_add(WORKLOAD, Pool.of([]), [replace(QUICK, latency_s=99.0)], 1.0) is None


def test_all_at_once() -> None:
    advice = advise(WORKLOAD, [CHEAP], [CHEAP, QUICK])
    assert advice.added == (("cheap", 4), ("quick", 2))
    assert (advice.max_staleness, advice.publish_every) == (None, None)
    enough = advise(WORKLOAD, [replace(CHEAP, count=9)], [CHEAP])
    assert enough.added == (("cheap", 0),)
    assert (enough.max_staleness, enough.publish_every) == (2, 1)


def test_the_placement_takes_gifts_first_and_the_smallest_bound_that_is_as_cheap() -> None:
    available = [replace(CHEAP, count=20), QUICK, replace(GIFT, count=8)]
    assert place(WORKLOAD, available) == Placement(
        max_staleness=2, publish_every=1, mix=Mix(counts=(("gift", 8), ("cheap", 6)), cost_per_h=pytest.approx(1.2))
    )
    assert place(WORKLOAD, [QUICK]) is None
    sequential = place(replace(WORKLOAD, mode="sequential"), available, target=0.5)
    assert sequential is not None and (sequential.max_staleness, sequential.publish_every) == (0, 1)


def test_a_long_broadcast_is_placed_with_versions_farther_apart() -> None:
    found = place(replace(WORKLOAD, broadcast_s=1.9), [replace(CHEAP, count=20)])
    assert found is not None and (found.max_staleness, found.publish_every) == (4, 2)


@settings(max_examples=8, deadline=None)
@given(st.floats(0.3, 1.0), st.floats(0.0, 1.0))
def test_a_placement_reaches_its_goal_and_needs_every_paid_node(target: float, broadcast: float) -> None:
    workload = replace(WORKLOAD, broadcast_s=broadcast)
    available = {one.name: one for one in (CHEAP, QUICK, GIFT)}
    found = place(workload, list(available.values()), target=target)
    if found is None:
        return
    chosen = replace(workload, max_staleness=found.max_staleness, publish_every=found.publish_every)
    nodes = [replace(available[name], count=count) for name, count in found.mix.counts]
    assert reaches(chosen, Pool.of(nodes), target)
    for place_of, node in enumerate(nodes):
        if node.cost_per_h:
            fewer = [*nodes[:place_of], replace(node, count=node.count - 1), *nodes[place_of + 1 :]]
            assert not reaches(chosen, Pool.of(fewer), target)
