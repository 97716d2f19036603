"""The provisioning rule, node by node: how much of what a pool samples can be trained on, and how old that is at least.

The strict case of `model`: every node samples all the time, so that none of a version's rollouts is begun before the
version arrives. Steps take T seconds, one after the other; every kappa-th version is published. Version v is made at vT
and is on node i B_i later. A rollout takes L_i from its lease to its reward, and step k, which begins at (k - 1) T, may
train on it if k - 1 - v <= S. So version v is of use for rollouts that begin between vT + B_i and (v + S) T - L_i, and
no longer than until the next one comes:

    useful rollouts of a period  =  sum_i mu_i min(kappa T, max(0, S T - B_i - L_i))

A pool keeps the learner busy where that is at least the kappa R rollouts that kappa steps take: with kappa = 1 this is
enough for the condition of `model`, which counts slots as half-way through older work when a version arrives. With B_i
for all alike and L_i = 0 this is ECHO-2's rule (arXiv 2602.02192) for a window of S T.

How old they are at least: a rollout that ends u before a step begins was begun by the newest version that the node
had. So it lags by x = (u + L_i + B_i) / T steps and, with kappa = 1, is ceil(x) steps old when that step takes it. Over
one step u goes from 0 to T. With (L_i + B_i) / T = a + f, f < 1, a share 1 - f of what the node samples is a + 1 steps
old, and a share f is a + 2. Of all that, R rollouts a step are trained on, and the youngest of it have the least mean
staleness. That is an ideal schedule, just in time: each node always samples, by its newest version, and what is not
needed is what would be oldest. With kappa > 1 a rollout's version is also a multiple of kappa: for the step that
learner version m takes, its staleness is the smallest s >= ceil(x) with m - s divisible by kappa.

Lengths that vary are taken by their mean. That all rollouts of a group are as old as its oldest is left out, so this is
a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.capacity.model import Workload

_Each = TypeVar("_Each", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeByNode:
    """A pool whose nodes have versions at different times; all arrays are [N]."""

    rollouts_per_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    """From lease to reward."""
    broadcast_s: NDArray[np.float64]
    """From the end of a step until the hub knows that the node has its version."""


def useful_rollouts(pool: NodeByNode, workload: Workload) -> float:
    """Of one step, on average: `rollouts_per_step` keep the learner busy."""
    return float(useful_rollouts_of_each(pool, workload).sum())


def useful_rollouts_of_each(pool: NodeByNode, workload: Workload) -> NDArray[np.float64]:
    """Of one step, on average, that each node brings in time, [N]."""
    late_s = pool.broadcast_s + pool.latency_s
    step_s, every, bound = workload.step_s, workload.publish_every, workload.staleness_bound
    return in_time(pool.rollouts_per_s, late_s, step_s=step_s, publish_every=every, staleness_bound=bound, clip=np.clip)


def in_time(
    rollouts_per_s: _Each,
    late_s: _Each,
    *,
    step_s: float,
    publish_every: int,
    staleness_bound: int,
    clip: Callable[[_Each, float, float], _Each],
) -> _Each:
    """The rule's term mu_i min(kappa T, max(0, S T - B_i - L_i)) / kappa of one node, or of each, [N]; `late_s` is
    B_i + L_i. `clip`: as numpy's, of the one or the other, for numpy takes long for one."""
    window_s = clip(staleness_bound * step_s - late_s, 0.0, publish_every * step_s)
    return rollouts_per_s * window_s / publish_every


def clip_one(value: float, least: float, most: float) -> float:
    """`numpy.clip` of one number."""
    return most if value > most else least if value < least else value


def needed_staleness(pool: NodeByNode, workload: Workload) -> float | None:
    """The least mean staleness of a learner that is always busy; None: the pool cannot keep it busy."""
    lag = (pool.broadcast_s + pool.latency_s) / workload.step_s
    whole = np.floor(lag).astype(int)
    in_step = pool.rollouts_per_s * workload.step_s
    period = workload.publish_every
    by_age = np.zeros(workload.staleness_bound + 1)
    for learner_version in range(period):
        for least, share in ((whole + 1, 1 - (lag - whole)), (whole + 2, lag - whole)):
            age = least + (learner_version - least) % period
            fits = age <= workload.staleness_bound
            np.add.at(by_age, age[fits], (in_step * share / period)[fits])
    if by_age.sum() < workload.rollouts_per_step:
        return None
    before = np.cumsum(by_age) - by_age
    taken = np.clip(workload.rollouts_per_step - before, 0.0, by_age)
    return float(np.dot(np.arange(len(by_age)), taken) / workload.rollouts_per_step)
