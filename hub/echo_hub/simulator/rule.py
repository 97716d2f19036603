"""The provisioning rule: how much of what a pool samples can be trained on, and how old that is at least.

Steps take T seconds, one after the other; every kappa-th version is published. Version v is made at vT and is on node i
D_i later (export, dissemination, report). A rollout takes L_i from its lease to its reward (network, prefill, sampling,
score), and step k, which begins at (k - 1) T, may train on it if k - 1 - v <= S. So version v is of use for rollouts
that begin between vT + D_i and (v + S) T - L_i, and no longer than until the next one comes:

    useful rollouts of a period  =  sum_i mu_i min(kappa T, max(0, S T - D_i - L_i)),    mu_i = width_i / sampling time

The pool keeps the learner busy if and only if that is at least the kappa R rollouts that kappa steps take. With D_i for
all alike and L_i = 0 this is ECHO-2's rule (arXiv 2602.02192) for a window of S T.

How old they are at least: a rollout that ends u before a step begins was begun by the newest version that the node
had. So it lags by x = (u + L_i + D_i) / T steps and, with kappa = 1, is ceil(x) steps old when that step takes it. Over
one step u goes from 0 to T. With (L_i + D_i) / T = a + f, f < 1, a share 1 - f of what the node samples is a + 1 steps
old, and a share f is a + 2. Of all that, R rollouts a step are trained on, and the youngest of it have the least mean
staleness. That is an ideal schedule, just in time: each node always samples, by its newest version, and what is not
needed is what would be oldest. With kappa > 1 a rollout's version is also a multiple of kappa: for the step that
learner version m takes, its staleness is the smallest s >= ceil(x) with m - s divisible by kappa.

Lengths that vary are taken by their mean. That all rollouts of a group are as old as its oldest is left out, so this is
a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo_hub.simulator.lengths import Lengths
from echo_hub.simulator.population import draw_nodes
from echo_hub.simulator.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Honest nodes; all arrays are [N]."""

    rollouts_per_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    """From lease to reward."""
    dissemination_s: NDArray[np.float64]
    """From the end of a step until the hub knows that the node has its version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the learner takes."""

    step_s: float
    """From the beginning of a step to the beginning of the next."""
    rollouts_per_step: float
    max_staleness: int
    publish_every: int


def pool_of(scenario: Scenario) -> Pool:
    nodes = draw_nodes(scenario)
    lengths = Lengths(scenario.lengths, group_size=scenario.training.group_size, seed=scenario.run.seed)
    delay_s = scenario.nodes.delay_s
    sampling_s = lengths.mean * np.array([node.s_per_token for node in nodes])
    prefill_s = np.array([node.prefill_s for node in nodes])
    width = np.array([node.width for node in nodes])
    return Pool(
        rollouts_per_s=width / sampling_s * scenario.availability.on_share,
        latency_s=sampling_s + prefill_s + 2 * delay_s + scenario.learner.score_s,
        dissemination_s=scenario.publication.export_s + np.array([node.fetch_s for node in nodes]) + delay_s,
    )


def demand_of(scenario: Scenario) -> Demand:
    learner, training = scenario.learner, scenario.training
    return Demand(
        step_s=learner.step_s + learner.step_s_per_rollout * scenario.rollouts_per_step + learner.handoff_s,
        rollouts_per_step=scenario.rollouts_per_step,
        max_staleness=training.max_staleness if scenario.run.mode == "async" else 0,
        publish_every=training.publish_every,
    )


def useful_rollouts(pool: Pool, demand: Demand) -> float:
    """Of one step, on average: more than `rollouts_per_step` keep the learner busy."""
    period_s = demand.publish_every * demand.step_s
    window_s = demand.max_staleness * demand.step_s - pool.dissemination_s - pool.latency_s
    useful_s = np.minimum(period_s, np.maximum(0.0, window_s))
    return float(np.dot(pool.rollouts_per_s, useful_s)) / demand.publish_every


def needed_staleness(pool: Pool, demand: Demand) -> float | None:
    """The least mean staleness of a learner that is always busy; None: the pool cannot keep it busy."""
    lag = (pool.dissemination_s + pool.latency_s) / demand.step_s
    whole = np.floor(lag).astype(int)
    in_step = pool.rollouts_per_s * demand.step_s
    period = demand.publish_every
    by_age = np.zeros(demand.max_staleness + 1)
    for learner_version in range(period):
        for least, share in ((whole + 1, 1 - (lag - whole)), (whole + 2, lag - whole)):
            age = least + (learner_version - least) % period
            fits = age <= demand.max_staleness
            np.add.at(by_age, age[fits], (in_step * share / period)[fits])
    if by_age.sum() < demand.rollouts_per_step:
        return None
    before = np.cumsum(by_age) - by_age
    taken = np.clip(demand.rollouts_per_step - before, 0.0, by_age)
    return float(np.dot(np.arange(len(by_age)), taken) / demand.rollouts_per_step)
