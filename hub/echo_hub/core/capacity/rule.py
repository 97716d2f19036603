"""Provisioning rule: each node's number of trainable rollouts, and the pool's minimum staleness.

This is the strict case of `model`: nodes sample all the time, so no rollout of a version begins before the version
arrives. Steps take T seconds each, and every kappa-th version is published. Version v is made at vT and reaches node i
B_i later. A rollout takes L_i from lease to reward, and node i samples mu_i rollouts a second. S is the staleness
bound. Step k begins at (k - 1) T and may train on the rollout if k - 1 - v <= S. So version v is useful for rollouts
that begin between vT + B_i and (v + S) T - L_i. The next version's arrival ends this interval early:

    useful rollouts per period  =  sum_i mu_i min(kappa T, max(0, S T - B_i - L_i))

A step trains on R rollouts, so a pool keeps the learner busy if this is at least kappa R. With kappa = 1 this implies
the condition of `model`, which counts slots as half-way through older work when a version arrives. With equal B_i and
L_i = 0 this is ECHO-2's rule (arXiv 2602.02192) for a window of S T.

Minimum staleness: consider a rollout that ends u seconds before a step begins. It began with its node's newest version,
so it lags by x = (u + L_i + B_i) / T steps. With kappa = 1 its staleness in that step is ceil(x). Over one step u goes
from 0 to T. Let (L_i + B_i) / T = a + f with f < 1. Then a share 1 - f of the node's output has staleness a + 1, and a
share f has a + 2. Training takes R rollouts a step; taking the freshest minimises the mean staleness. This is an ideal
just-in-time schedule: nodes always sample with their newest version, and only the stalest output is unused. With kappa
> 1 versions are multiples of kappa. For the step that consumes at learner version m, staleness is the smallest s >=
ceil(x) with m - s divisible by kappa.

Lengths enter by their mean. Groups are as stale as their oldest rollout, which is ignored here, so the result is a
lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.capacity.model import Workload

Each = TypeVar("Each", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeByNode:
    """Nodes that get versions at different times; all arrays are [N], one element per node."""

    rollouts_per_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    """Seconds from lease to reward of a rollout, for each node."""
    broadcast_s: NDArray[np.float64]
    """Seconds from the end of a step until the hub knows that the node has the new version, for each node."""


def useful_rollouts(pool: NodeByNode, workload: Workload) -> float:
    """Return how many rollouts per step the pool returns in time, on average. With `rollouts_per_step` of them the
    learner is always busy."""
    return float(useful_rollouts_of_each(pool, workload).sum())


def useful_rollouts_of_each(pool: NodeByNode, workload: Workload) -> NDArray[np.float64]:
    """Return how many rollouts per step each node returns in time, on average, [N]."""
    late_s = pool.broadcast_s + pool.latency_s
    step_s, every, bound = workload.step_s, workload.publish_every, workload.staleness_bound
    return in_time(pool.rollouts_per_s, late_s, step_s=step_s, publish_every=every, staleness_bound=bound)


def in_time(rollouts_per_s: Each, late_s: Each, *, step_s: float, publish_every: int, staleness_bound: int) -> Each:
    """Return the rollouts per step that arrive in time, for one node or for each [N].

    `late_s` is the node's broadcast time plus its latency. A rollout arrives in time if it begins within
    `staleness_bound` · `step_s` - `late_s` seconds after the node got a version. No rollout begins later than
    `publish_every` · `step_s` seconds after that, because then the next version arrives.
    """
    most_s, left_s = publish_every * step_s, staleness_bound * step_s - late_s
    if isinstance(left_s, float):  # numpy is slow on single numbers.
        return rollouts_per_s * min(max(left_s, 0.0), most_s) / publish_every
    return rollouts_per_s * np.clip(left_s, 0.0, most_s) / publish_every


def needed_staleness(pool: NodeByNode, workload: Workload) -> float | None:
    """Return the smallest mean staleness with which the pool keeps the learner busy; None: it cannot."""
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
