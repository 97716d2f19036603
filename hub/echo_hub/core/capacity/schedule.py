"""From step to step: when the learner plans each, given what a pool yields in time.

Steps are played through one by one, oldest rollouts first, until they repeat themselves: a step that waits makes the
versions after it late, so their average is not that of any single formula. One step costs O(log nodes).

Worked example: R = 32, T = 1, T_bcast = 1/2, S = kappa = 2, nodes without latency that yield 42.7 a second, 4/3 of
what is needed. Step 2 needs 32 rollouts of version 0, which takes 1/2 + 3/4: it is planned at 1.25 instead of at 1.
Step 3 follows without waiting, and version 2 is there at 2.25. So two steps take 2.25, and the learner trains for 89 %
of the time; by ECHO-2's rule it would never wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from echo_hub.core.capacity.model import Pool, Prediction, Workload

MOST_CYCLES: Final = 160
"""Publications that are played through where they do not become alike; the last half of them are averaged."""

LEAST_ALIKE: Final = 6
"""So many publications in a row, and one for each that the bound covers, and it repeats itself."""

BISECTIONS: Final = 30
SAME: Final = 1e-6
"""Durations that differ by less than this share are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One step of the schedule; seconds from its begin."""

    step: int
    planned_at: float
    waited_s: float
    """How long the learner had nothing to do before it."""
    trained_at: float
    arrived_at: float | None
    """When nodes had the version that it made; None where that is not published."""


@dataclass(slots=True, kw_only=True)
class _Version:
    number: int
    arrived_at: float
    lasts_s: float = math.inf
    used: float = 0.0


def predict(workload: Workload, pool: Pool) -> Prediction:
    """What comes of it when it has run for a while."""
    period = period_s(workload, pool)
    return Prediction(
        busy=period <= workload.step_s * (1 + SAME),
        period_s=period,
        utilisation=workload.train_s / period,
        rollouts_per_s=pool.rollouts_per_s,
        needed_per_s=workload.rollouts_per_step / workload.step_s,
    )


def period_s(workload: Workload, pool: Pool) -> float:
    """Seconds from step to step, on average; infinite where nobody samples."""
    if not pool.rollouts_per_s:
        return math.inf
    every, spread_s = workload.publish_every, _spread_s(workload)
    if workload.staleness_bound == 0 and every == 1:
        return workload.step_s + spread_s + _makespan(workload, pool)
    alike = LEAST_ALIKE + workload.staleness_bound // every
    # What waits from the run's begin hides these two for a while.
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
    """Their mean in the long run, where they come round again after a number of them that is not known: a plain mean
    depends on how much of the last round is among them, one whose weights fall to 0 at both ends hardly does. Weighted
    Birkhoff average (Das, Saiki, Sander and Yorke, arXiv 1601.06051)."""
    places = [(number + 1) / (len(durations) + 1) for number in range(len(durations))]
    weights = [math.exp(-1 / (place * (1 - place))) for place in places]
    return sum(weight * each for weight, each in zip(weights, durations, strict=True)) / sum(weights)


def steps(workload: Workload, pool: Pool) -> Iterator[PlannedStep]:
    """The steps from the run's begin, for ever: the base is with all nodes at 0. The pool is not empty."""
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
    """Rollouts of the version that have come in and are not used."""
    rested = workload.staleness_bound == 0
    supplied = pool.supply(at - version.arrived_at, version.lasts_s, rested=rested) if at > version.arrived_at else 0.0
    return max(0.0, supplied - version.used)


def _enough_at(workload: Workload, pool: Pool, versions: deque[_Version], free_at: float) -> float:
    """When a step's rollouts are there, not before `free_at`."""

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
    """How long a pool that stands still takes for one step's rollouts."""
    early, late = 0.0, workload.rollouts_per_step / pool.rollouts_per_s + float(pool.latencies[-1])
    for _ in range(BISECTIONS):
        middle = (early + late) / 2
        enough = pool.supply(middle, math.inf, rested=True) >= workload.rollouts_per_step * (1 - SAME)
        early, late = (early, middle) if enough else (middle, late)
    return late
