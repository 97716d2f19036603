from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from echo_hub.core.capacity.model import NodeClass, Pool, Workload
from echo_hub.core.capacity.schedule import period_s, predict, steps
from tests.echo_hub.core.capacity.condition import never_waits

EQUAL = Pool.of([NodeClass(name="n", count=16, rollouts_per_s=2.5, latency_s=0.8)])


def workload(**changed: object) -> Workload:
    usual = Workload(mode="async", rollouts_per_step=32, train_s=1.0, broadcast_s=0.25, max_staleness=2)
    return replace(usual, **changed)  # type: ignore[arg-type]


def pool_of(rate: float, latency: float = 0.0) -> Pool:
    return Pool.of([NodeClass(name="n", count=1, rollouts_per_s=rate, latency_s=latency)])


# --- computed by hand


def test_a_step_of_two_that_has_to_wait() -> None:
    """With two steps per version the pool meets ECHO-2's rule. Still the learner waits before every second step, for a
    quarter of a step's time.
    """
    pool = pool_of(32 * 4 / 3)
    asked = workload(broadcast_s=0.5, publish_every=2)
    told = predict(asked, pool)
    assert told.period_s == pytest.approx(2.25 / 2, rel=1e-4)
    assert (told.busy, told.missing_per_s) == (False, 0.0)
    waits = [step.waited_s for step in itertools.islice(steps(asked, pool), 12)]
    assert waits[-4:] == pytest.approx([0.0, 0.25, 0.0, 0.25], abs=1e-3) or waits[-4:] == pytest.approx(
        [0.25, 0.0, 0.25, 0.0], abs=1e-3
    )


def test_sequential_phases_follow_each_other() -> None:
    """Sequential mode overlaps nothing: a period is one lease (32 slots for 32 rollouts), hand-off,
    step and broadcast.
    """
    told = predict(workload(mode="sequential", hand_off_s=0.1), EQUAL)
    assert told.period_s == pytest.approx(1.0 + 0.1 + 0.25 + 0.8, rel=1e-4)
    assert told.utilisation == pytest.approx(1 / 2.15, rel=1e-4)


def test_colocated_sends_nothing() -> None:
    assert period_s(workload(mode="colocated", broadcast_s=9.0), pool_of(16.0)) == pytest.approx(1.0 + 2.0, rel=1e-4)


def test_a_throughput_shortage_alone_decides_the_period() -> None:
    told = predict(workload(max_staleness=6), pool_of(24.0, 0.1))
    assert told.period_s == pytest.approx(32 / 24, rel=1e-3)
    assert told.missing_per_s == pytest.approx(8.0)


def test_versions_that_are_made_faster_than_they_are_sent() -> None:
    told = predict(workload(broadcast_s=1.5, max_staleness=4), pool_of(1_000.0))
    assert told.period_s == pytest.approx(1.5, rel=1e-3)
    assert predict(workload(broadcast_s=1.5, max_staleness=4, publish_every=2), pool_of(1_000.0)).busy


def test_the_hand_off_is_not_to_be_hidden() -> None:
    told = predict(workload(hand_off_s=0.25, max_staleness=6), pool_of(1_000.0))
    assert told.busy
    assert told.utilisation == pytest.approx(0.8)


def test_without_nodes_nothing_is_trained() -> None:
    told = predict(workload(), Pool.of([]))
    assert (told.period_s, told.utilisation, told.busy) == (math.inf, 0.0, False)


def test_a_steps_version_arrives_after_its_broadcast() -> None:
    asked = workload(broadcast_s=0.5, publish_every=2)
    first, second = itertools.islice(steps(asked, pool_of(64.0)), 2)
    assert (first.step, first.planned_at, first.trained_at) == pytest.approx((1, 0.5, 1.5))
    assert first.arrived_at is None
    assert (second.waited_s, second.arrived_at) == pytest.approx((0.0, 3.0))


# --- ECHO-2 (arXiv 2602.02192)


@given(st.floats(0.0, 0.9), st.floats(10.0, 100.0))
def test_its_rule_is_the_case_without_latency_of_one_step_a_version(broadcast: float, rate: float) -> None:
    """ECHO-2 requires sum(mu) >= kappa R / (kappa T - T_bcast) (mu: rollouts per second of each node, R: rollouts per
    step, T: seconds per step, kappa: steps per version). The model must agree on both sides of this threshold, here
    for kappa = 1 and a staleness bound of 1.
    """
    asked = workload(max_staleness=1, broadcast_s=broadcast)
    needed = 32 / (1.0 - broadcast)
    assume(abs(rate / needed - 1) > 1e-4)
    assert never_waits(asked, pool_of(rate)) == predict(asked, pool_of(rate)).busy == (rate >= needed)


@given(st.integers(1, 4), st.floats(0.0, 0.9), st.floats(0.2, 3.0))
def test_its_rule_is_necessary_for_every_interval(every: int, broadcast: float, share: float) -> None:
    asked = workload(max_staleness=every, publish_every=every, broadcast_s=broadcast)
    needed = every * 32 / (every - broadcast)
    assume(share < 1 - 1e-4)
    assert not predict(asked, pool_of(share * needed)).busy


# --- in general

workloads = st.builds(
    lambda bound, every, broadcast, hand_off: workload(
        max_staleness=bound, publish_every=min(every, bound + 1), broadcast_s=broadcast, hand_off_s=hand_off
    ),
    st.integers(0, 5),
    st.integers(1, 4),
    st.floats(0.0, 2.0),
    st.sampled_from([0.0, 0.2]),
)
pools = st.lists(
    st.builds(
        NodeClass,
        name=st.just("n"),
        count=st.integers(1, 4),
        rollouts_per_s=st.floats(1.0, 20.0),
        latency_s=st.floats(0.0, 2.0),
    ),
    min_size=1,
    max_size=4,
).map(Pool.of)
ROUNDING = 1 + 1e-3


@settings(max_examples=60, deadline=None)
@given(workloads, pools, st.floats(1.0, 3.0))
def test_more_throughput_is_never_slower(asked: Workload, pool: Pool, times: float) -> None:
    more = Pool(latencies=pool.latencies, rates=pool.rates * times)
    assert period_s(asked, more) <= period_s(asked, pool) * ROUNDING


def test_steps_that_come_round_in_fives_are_averaged_over_whole_rounds() -> None:
    pool = Pool(latencies=np.array([0.0, 2.542]), rates=np.array([16.054, 16.2035]))
    for bound in (2, 3, 4):
        asked = workload(broadcast_s=1.874, max_staleness=bound)
        ends = [step.trained_at for step in itertools.islice(steps(asked, pool), 520)]
        assert period_s(asked, pool) == pytest.approx((ends[519] - ends[19]) / 500, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(workloads, pools)
@example(  # The schedule repeats after ten different steps.
    Workload(mode="async", rollouts_per_step=32, train_s=1.0, broadcast_s=1.9921875, hand_off_s=0.0, max_staleness=3),
    Pool(latencies=np.array([1.5625]), rates=np.array([15.6875])),
)
def test_a_larger_bound_is_never_slower(asked: Workload, pool: Pool) -> None:
    larger = replace(asked, max_staleness=asked.max_staleness + 1)
    assert period_s(larger, pool) <= period_s(asked, pool) * ROUNDING


@settings(max_examples=60, deadline=None)
@given(workloads, pools, st.floats(0.0, 1.0))
def test_a_shorter_broadcast_is_never_slower(asked: Workload, pool: Pool, times: float) -> None:
    shorter = replace(asked, broadcast_s=asked.broadcast_s * times)
    assert period_s(shorter, pool) <= period_s(asked, pool) * ROUNDING


@settings(max_examples=100, deadline=None)
@given(workloads, pools)
def test_no_step_is_faster_than_the_learner_or_than_the_pool(asked: Workload, pool: Pool) -> None:
    told = predict(asked, pool)
    assert told.period_s >= asked.step_s * (1 - 1e-6)
    assert told.period_s >= asked.rollouts_per_step / pool.rollouts_per_s * (1 - 1e-3)
    assert 0 < told.utilisation <= 1


@settings(max_examples=100, deadline=None)
@given(workloads, pools)
def test_a_pool_that_meets_the_condition_never_waits(asked: Workload, pool: Pool) -> None:
    if never_waits(asked, pool):
        assert predict(asked, pool).busy


@settings(max_examples=100, deadline=None)
@given(workloads, st.floats(10.0, 80.0), st.floats(0.0, 2.0))
def test_equal_nodes_that_never_wait_meet_the_condition(asked: Workload, rate: float, latency: float) -> None:
    assume(asked.max_staleness > 0)
    pool = pool_of(rate, latency)
    nearly = replace(
        asked, rollouts_per_step=asked.rollouts_per_step * (1 - 1e-4), broadcast_s=asked.broadcast_s - 1e-4
    )
    if predict(asked, pool).busy:
        assert never_waits(nearly, pool)


# --- compared with leases simulated one by one


def measured(asked: Workload, nodes: list[tuple[int, float]], *, spread: float, seed: int, most: int = 150) -> float:
    """Simulate leases one by one; return the share of time in which the learner trains.

    `nodes`: (slots, mean seconds per rollout). `spread`: lognormal sigma of these seconds. A free slot starts the next
    rollout whose step may still train on the nodes' version.
    """
    rng, number, now = random.Random(seed), itertools.count(), 0.0
    free, held, step, begun, order = [slots for slots, _ in nodes], 0, 0, [], itertools.count()
    events: list[tuple[float, int, str, int, int]] = []
    busy, sent_at, waiting, complete = False, 0.0, 0, {}  # Maps each complete rollout's number to its version.
    while len(begun) < most:
        while held >= step + waiting // int(asked.rollouts_per_step) - asked.staleness_bound and any(free):
            node = max(range(len(nodes)), key=lambda at: free[at] / nodes[at][0])
            free[node] -= 1
            waiting += 1
            lasts = nodes[node][1] * rng.lognormvariate(-(spread**2) / 2, spread)
            heapq.heappush(events, (now + lasts, next(order), "came", held, node))
        stale = [which for which, version in complete.items() if version < step - asked.staleness_bound]
        for which in stale:
            del complete[which]
        waiting -= len(stale)
        if not busy and len(complete) >= asked.rollouts_per_step:
            for which in sorted(complete)[: int(asked.rollouts_per_step)]:
                del complete[which]
            waiting -= int(asked.rollouts_per_step)
            busy, step = True, step + 1
            begun.append(now)
            heapq.heappush(events, (now + asked.step_s, next(order), "trained", step, 0))
        elif not (stale and any(free)):
            now, _, what, version, node = heapq.heappop(events)
            if what == "came":
                free[node] += 1
                complete[next(number)] = version
            elif what == "trained":
                busy = False
                if version % asked.publish_every == 0:
                    sent_at = max(now, sent_at) + asked.broadcast_s
                    heapq.heappush(events, (sent_at, next(order), "arrived", version, 0))
            else:
                held = version
    first, last = most // 3, most - 1
    first += (last - first) % asked.publish_every
    return asked.train_s * (last - first) / (begun[last] - begun[first])


def slow_lease(seconds: float, spread: float) -> float:
    """Return the 90th percentile of a lease's duration in seconds, if durations are lognormal with mean `seconds` and
    sigma `spread`.
    """
    return seconds * math.exp(-(spread**2) / 2 + 1.2816 * spread)


def drawn(rng: random.Random) -> tuple[Workload, list[tuple[int, float]]]:
    bound = rng.choice([1, 2, 3, 4])
    asked = workload(
        max_staleness=bound, publish_every=rng.randint(1, min(3, bound + 1)), broadcast_s=rng.choice([0.05, 0.25, 0.6])
    )
    lease_s, unequal = rng.choice([0.1, 0.4, 0.9, 1.6]), rng.choice([0.0, 0.5])
    wanted = 32 * rng.choice([0.7, 0.9, 1.1, 1.3, 2.0])
    nodes = [(rng.randint(1, 8), lease_s * rng.lognormvariate(0, unequal)) for _ in range(10)]
    rate = sum(slots / seconds for slots, seconds in nodes)
    return asked, [(max(1, round(slots * wanted / rate)), seconds) for slots, seconds in nodes]


@pytest.mark.parametrize(("spread", "mean_error"), [(0.0, 0.04), (0.47, 0.05), (0.83, 0.09)])
def test_predictions_are_near_simulated_leases(spread: float, mean_error: float) -> None:
    rng, errors = random.Random(7), []
    for seed in range(24):
        asked, nodes = drawn(rng)
        pool = Pool.of(
            NodeClass(name="n", count=1, rollouts_per_s=slots / seconds, latency_s=slow_lease(seconds, spread))
            for slots, seconds in nodes
        )
        errors.append(predict(asked, pool).utilisation - measured(asked, nodes, spread=spread, seed=seed))
    assert fmean(map(abs, errors)) < mean_error
    assert abs(fmean(errors)) < mean_error


@pytest.mark.parametrize(("bound", "utilisation"), [(0, 0.49), (2, 1.0)])
def test_equal_nodes_leased_one_by_one(bound: int, utilisation: float) -> None:
    asked = workload(max_staleness=bound)
    assert measured(asked, [(2, 0.8)] * 16, spread=0.0, seed=0) == pytest.approx(utilisation, abs=0.01)
    assert predict(asked, EQUAL).utilisation == pytest.approx(utilisation, abs=0.01)


def test_a_hundred_thousand_nodes_take_no_time() -> None:
    rng = np.random.default_rng(0)
    nodes = [
        NodeClass(name="n", count=1, rollouts_per_s=rate, latency_s=latency)
        for rate, latency in rng.lognormal(0.0, 0.6, (100_000, 2)).tolist()
    ]
    begun = time.process_time()
    told = predict(
        workload(rollouts_per_step=150_000, broadcast_s=0.9, max_staleness=3, publish_every=2), Pool.of(nodes)
    )
    assert time.process_time() - begun < 1.0
    assert 0.5 < told.utilisation < 1
