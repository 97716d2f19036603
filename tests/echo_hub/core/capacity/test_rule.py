"""The provisioning rule and the smallest sufficient mean staleness, computed by hand. A pool that meets the rule must
meet the no-wait condition of `capacity.model`.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from echo_hub.core.capacity.model import NodeClass, Pool, Workload
from echo_hub.core.capacity.rule import NodeByNode, needed_staleness, useful_rollouts
from echo_hub.core.capacity.schedule import predict
from tests.echo_hub.core.capacity.condition import never_waits


def pool(*nodes: tuple[float, float, float]) -> NodeByNode:
    """Return a pool; each node is (rollouts per second, latency in seconds, broadcast in seconds)."""
    rates, latencies, ways = np.array(nodes).T
    return NodeByNode(rollouts_per_s=rates, latency_s=latencies, broadcast_s=ways)


def demand(rollouts: float = 1.0, *, bound: int = 2, period: int = 1) -> Workload:
    return Workload(
        mode="async", rollouts_per_step=rollouts, train_s=9.0, hand_off_s=1.0, max_staleness=bound, publish_every=period
    )


@pytest.mark.parametrize(
    ("bound", "period", "expected"),
    [
        (0, 1, 0.0),
        (1, 1, 2 * 5.0),  # 10 s per step, less 5 s for broadcast and rollout; 2 rollouts per s.
        (2, 1, 2 * 10.0),  # Fresh for 15 s, but after 10 s the next version replaces it.
        (2, 2, 2 * 15.0 / 2),  # Fresh for 15 of the 20 s that a version lasts; halved: these 20 s are two steps.
        (3, 2, 2 * 20.0 / 2),
    ],
)
def test_useful_rollouts_are_those_sampled_in_time(bound: int, period: int, expected: float) -> None:
    assert useful_rollouts(pool((2.0, 3.0, 2.0)), demand(bound=bound, period=period)) == pytest.approx(expected)


def test_a_node_that_is_too_slow_adds_nothing() -> None:
    assert useful_rollouts(pool((2.0, 3.0, 2.0), (1.0, 100.0, 0.0)), demand(bound=1)) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("rollouts", "expected"),
    [
        (10.0, 1.0),  # The first 10 of a step's 20 useful rollouts are one step old.
        (20.0, 1.5),
        (15.0, (10 * 1 + 5 * 2) / 15),  # The freshest 15 rollouts: 10 are 1 step old, 5 are 2.
        (21.0, None),
    ],
)
def test_the_least_mean_staleness(rollouts: float, expected: float | None) -> None:
    assert needed_staleness(pool((2.0, 3.0, 2.0)), demand(rollouts)) == (expected and pytest.approx(expected))


def test_the_least_mean_staleness_where_versions_are_rarer() -> None:
    """Each version is used for two steps, and is one step older in the second: of both steps' 40 rollouts, 10 are 1, 20
    are 2 and 10 are 3 steps old.
    """
    one = pool((2.0, 3.0, 2.0))
    assert needed_staleness(one, demand(20.0, bound=3, period=2)) == pytest.approx((10 * 1 + 20 * 2 + 10 * 3) / 40)
    assert needed_staleness(one, demand(20.0, bound=2, period=2)) is None


def test_useful_rollouts_and_needed_staleness_agree() -> None:
    some = pool((2.0, 3.0, 2.0), (1.0, 14.0, 2.0), (0.5, 40.0, 1.0))
    for bound in (1, 2, 3, 5):
        most = useful_rollouts(some, demand(bound=bound))
        assert needed_staleness(some, demand(most * 0.999, bound=bound)) is not None
        assert needed_staleness(some, demand(most * 1.001, bound=bound)) is None


nodes = st.tuples(st.floats(0.1, 10.0), st.floats(0.0, 12.0))


@given(st.lists(nodes, min_size=1, max_size=6), st.integers(1, 4), st.floats(0.0, 9.0), st.floats(0.5, 60.0))
def test_a_pool_that_meets_the_rule_keeps_the_learner_busy(
    some: list[tuple[float, float]], bound: int, broadcast_s: float, rollouts: float
) -> None:
    asked = Workload(
        mode="async", rollouts_per_step=rollouts, train_s=10.0, broadcast_s=broadcast_s, max_staleness=bound
    )
    by_node = pool(*((rate, latency_s, broadcast_s) for rate, latency_s in some))
    assume(useful_rollouts(by_node, asked) >= rollouts * 1.001)
    classes = [NodeClass(name="n", count=1, rollouts_per_s=rate, latency_s=latency) for rate, latency in some]
    assert never_waits(asked, Pool.of(classes))
    assert predict(asked, Pool.of(classes)).busy
