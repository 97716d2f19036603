"""Schedule of steps: when each step's rollouts have arrived and its training begins, given the supply of a pool.

Steps are simulated one by one, consuming the oldest rollouts first, until their durations repeat. A waiting step delays
all later versions, so no closed formula gives the average. One step costs O(log nodes).

Worked example: R = 32, T = 1, T_bcast = 1/2, S = kappa = 2, nodes without latency that yield 42.7 rollouts a second,
4/3 of the demand. Step 2 needs 32 rollouts of version 0, which takes 1/2 + 3/4, so it is planned at 1.25 instead of 1.
Step 3 follows without waiting, and version 2 arrives at 2.25. So two steps take 2.25, and the learner trains for 89 %
of the time. ECHO-2's rule predicts no waiting here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from echo_hub.core.capacity.model import Pool, Prediction, Workload

MOST_CYCLES: Final = 160
"""Number of simulated publications after which the search for a repeating schedule ends. The durations of the second
half are then averaged."""

LEAST_ALIKE: Final = 6
"""The schedule counts as periodic after this many equal publication intervals in a row, plus one for each publication
within the staleness bound."""

BISECTIONS: Final = 30
"""Number of halvings of the interval in each search by bisection; each halves the error."""
SAME: Final = 1e-6
"""Relative difference up to which two durations of steps count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One step of the schedule; times in seconds from the start."""

    step: int
    planned_at: float
    waited_s: float
    """Idle time of the learner before this step."""
    trained_at: float
    arrived_at: float | None
    """Time at which the step's version arrives at the nodes; None if it is not published."""


@dataclass(slots=True, kw_only=True)
class _Version:
    number: int
    arrived_at: float
    lasts_s: float = math.inf
    used: float = 0.0


def predict(workload: Workload, pool: Pool) -> Prediction:
    """Return the performance of the pool on the workload in steady state."""
    period = period_s(workload, pool)
    return Prediction(
        busy=period <= workload.step_s * (1 + SAME),
        period_s=period,
        utilisation=workload.train_s / period,
        rollouts_per_s=pool.rollouts_per_s,
        needed_per_s=workload.rollouts_per_step / workload.step_s,
    )


def period_s(workload: Workload, pool: Pool) -> float:
    """Return the average seconds from step to step in steady state; infinite if no node samples."""
    if not pool.rollouts_per_s:
        return math.inf
    every, spread_s = workload.publish_every, _spread_s(workload)
    if workload.staleness_bound == 0 and every == 1:
        return workload.step_s + spread_s + _makespan(workload, pool)
    alike = LEAST_ALIKE + workload.staleness_bound // every
    # The first simulated steps are too fast, because they use rollouts buffered at the start. So bound the result by
    # the limits of throughput and of broadcasts.
    least_s = max(workload.rollouts_per_step / pool.rollouts_per_s, spread_s / every)
    cycles: list[float] = []
    begun_at = 0.0
    for planned in steps(workload, pool):
        if planned.step % every == 0:
            cycles.append(planned.trained_at - begun_at)
            begun_at = planned.trained_at
            recent = cycles[-alike:]
            if len(cycles) >= 2 * alike and max(recent) - min(recent) <= SAME * recent[-1]:
                return max(recent[-1] / every, least_s)
            if len(cycles) >= MOST_CYCLES:
                break
    return max(_long_run(cycles[MOST_CYCLES // 2 :]) / every, least_s)


def _long_run(durations: Sequence[float]) -> float:
    """Return the long-run mean of quasi-periodic durations.

    The plain mean depends on the fraction of the last, incomplete period. Weights that fall to 0 at both ends remove
    this dependence: the weighted Birkhoff average (Das, Saiki, Sander and Yorke, arXiv 1601.06051).
    """
    places = [(number + 1) / (len(durations) + 1) for number in range(len(durations))]
    weights = [math.exp(-1 / (place * (1 - place))) for place in places]
    return sum(weight * each for weight, each in zip(weights, durations, strict=True)) / sum(weights)


def steps(workload: Workload, pool: Pool) -> Iterator[PlannedStep]:
    """Yield the steps from the run's start, without end. All nodes have the base model at time 0. The pool must not be
    empty."""
    versions = deque([_Version(number=0, arrived_at=0.0)])
    free_at, step = 0.0, 0
    spread_s = _spread_s(workload)
    while True:
        step += 1
        while len(versions) > 1 and versions[0].number < step - 1 - workload.staleness_bound:
            versions.popleft()
        planned_at = _enough_at(workload, pool, versions, free_at)
        _use(workload, pool, versions, planned_at)
        trained_at = planned_at + workload.step_s
        arrived_at = None
        if step % workload.publish_every == 0:
            newest = versions[-1]
            arrived_at = max(trained_at, newest.arrived_at) + spread_s
            newest.lasts_s = arrived_at - newest.arrived_at
            versions.append(_Version(number=step, arrived_at=arrived_at))
        yield PlannedStep(
            step=step,
            planned_at=planned_at,
            waited_s=planned_at - free_at,
            trained_at=trained_at,
            arrived_at=arrived_at,
        )
        free_at = trained_at


def _spread_s(workload: Workload) -> float:
    return 0.0 if workload.mode == "colocated" else workload.broadcast_s


def _there(workload: Workload, pool: Pool, version: _Version, at: float) -> float:
    """Return how many rollouts of the version have arrived at time `at` and are not used by a step."""
    rested = workload.staleness_bound == 0
    supplied = pool.supply(at - version.arrived_at, version.lasts_s, rested=rested) if at > version.arrived_at else 0.0
    return max(0.0, supplied - version.used)


def _enough_at(workload: Workload, pool: Pool, versions: deque[_Version], free_at: float) -> float:
    """Return the time at which enough rollouts for a step have arrived, at the earliest `free_at`."""

    def is_enough(at: float) -> bool:
        there = sum(_there(workload, pool, version, at) for version in versions)
        return there >= workload.rollouts_per_step * (1 - SAME)

    if is_enough(free_at):
        return free_at
    early, wait_s = free_at, workload.step_s
    while not is_enough(free_at + wait_s):
        early, wait_s = free_at + wait_s, 2 * wait_s
    late = free_at + wait_s
    for _ in range(BISECTIONS):
        middle = (early + late) / 2
        early, late = (early, middle) if is_enough(middle) else (middle, late)
    return late


def _use(workload: Workload, pool: Pool, versions: deque[_Version], at: float) -> None:
    needed = workload.rollouts_per_step
    for version in versions:
        taken = min(needed, _there(workload, pool, version, at))
        version.used += taken
        needed -= taken


def _makespan(workload: Workload, pool: Pool) -> float:
    """Return the seconds that an idle pool needs to return one step's rollouts."""
    early, late = 0.0, workload.rollouts_per_step / pool.rollouts_per_s + float(pool.latencies[-1])
    for _ in range(BISECTIONS):
        middle = (early + late) / 2
        enough = pool.supply(middle, math.inf, rested=True) >= workload.rollouts_per_step * (1 - SAME)
        early, late = (early, middle) if enough else (middle, late)
    return late
