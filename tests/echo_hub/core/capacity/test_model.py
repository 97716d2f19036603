from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.core.capacity.model import NodeClass, Pool, Prediction, Workload

FAST = NodeClass(name="fast", count=2, rollouts_per_s=3.0, latency_s=1.0)
SLOW = NodeClass(name="slow", count=4, rollouts_per_s=0.5, latency_s=4.0)

classes = st.builds(
    NodeClass,
    name=st.just("x"),
    count=st.integers(0, 20),
    rollouts_per_s=st.floats(0.01, 10),
    latency_s=st.floats(0, 5),
)
seconds = st.floats(0, 20)


def by_hand(nodes: list[NodeClass], after: float, lasts: float, *, rested: bool) -> float:
    """Compute the formula in the docstring of `capacity.model`, one node at a time."""
    return sum(
        one.count * one.rollouts_per_s * max(0.0, min(after - (0 if rested else one.latency_s / 2), lasts))
        for one in nodes
        if one.latency_s <= after
    )


@pytest.mark.parametrize(
    ("after", "supply"),
    [
        (-1.0, 0.0),
        (0.9, 0.0),
        (1.0, 3.0),  # Six slots, one rollout per second each, useful for half a second.
        (3.0, 15.0),
        (4.0, 21.0 + 4.0),
        (11.0, 60.0 + 2 * 9.0),
        (99.0, 60.0 + 20.0),
    ],
)
def test_the_supply_of_a_version_by_time_equals_hand_computed_values(after: float, supply: float) -> None:
    assert Pool.of([SLOW, FAST]).supply(after, 10.0, rested=False) == pytest.approx(supply)


@given(st.lists(classes, max_size=6), seconds, seconds, st.booleans())
def test_sums_over_sorted_classes_are_the_formula(
    nodes: list[NodeClass], after: float, lasts: float, rested: bool
) -> None:
    pool = Pool.of(nodes)
    expected = by_hand(nodes, after, lasts, rested=rested)
    assert pool.supply(after, lasts, rested=rested) == pytest.approx(expected, abs=1e-9)
    assert pool.supply(after, math.inf, rested=rested) == pytest.approx(by_hand(nodes, after, math.inf, rested=rested))


@given(st.lists(classes, max_size=5), classes, seconds, seconds)
def test_adding_a_node_equals_a_pool_that_includes_it(
    nodes: list[NodeClass], one: NodeClass, after: float, lasts: float
) -> None:
    together, added = Pool.of([*nodes, one]), Pool.of(nodes).plus(one)
    assert added.rollouts_per_s == pytest.approx(together.rollouts_per_s)
    assert added.supply(after, lasts, rested=False) == pytest.approx(together.supply(after, lasts, rested=False))


def test_an_empty_pool_supplies_nothing() -> None:
    pool = Pool.of([])
    assert (pool.rollouts_per_s, pool.supply(9.0, 9.0, rested=True), pool.supply(9.0, 9.0, rested=False)) == (0, 0, 0)


def test_the_hand_off_is_part_of_a_step() -> None:
    workload = Workload(mode="sequential", rollouts_per_step=8, train_s=2.0, hand_off_s=0.5, max_staleness=3)
    assert (workload.step_s, workload.staleness_bound) == (2.5, 0)


def test_missing_and_idle_supply_are_reported() -> None:
    told = Prediction(busy=False, period_s=4.0, utilisation=0.75, rollouts_per_s=3.0, needed_per_s=5.0)
    assert (told.idle, told.missing_per_s) == (0.25, 2.0)
