"""What staleness costs in learning, and what a corrected objective gives back: reward against trained rollouts.

Each case trains the built-in model on additions with as many rollouts as every other, three seeds each, through the
hub's own coordinator and learner; see `virtual_run` for how rollouts grow old.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean
from typing import Any, Final

from benchmarks.learning import cases
from benchmarks.learning.cases import Case
from benchmarks.learning.plot import draw
from benchmarks.learning.virtual_run import Point, run
from benchmarks.measurement import Measurement

DESCRIPTION: Final = (
    "Held-out accuracy at equal trained rollouts: co-located, sequential, asynchronous by staleness bound"
)
SEEDS: Final = 3

Curves = dict[Case, list[list[Point]]]
"""One list of points a seed."""


def measure(seed: int) -> Measurement:
    curves = _curves([SEEDS * seed + number for number in range(SEEDS)])
    final = {case: fmean(points[-1].accuracy for points in of_case) for case, of_case in curves.items()}
    gap = {case: final[cases.COLOCATED] - accuracy for case, accuracy in final.items()}
    return Measurement(
        headline={
            "sequential_gap": gap[cases.SEQUENTIAL],
            "async_le_4_gap": max(gap[case] for bound, case in cases.BY_STALENESS.items() if bound <= 4),
            "async_8_corrected_gap": min(gap[case] for case in cases.CORRECTED_8),
        },
        rows=[_row(case, of_case, gap[case]) for case, of_case in curves.items()],
        conditions={
            "steps": cases.COLOCATED.steps,
            "rollouts_per_step": cases.COLOCATED.groups_per_step * cases.COLOCATED.group_size,
            "seeds": SEEDS,
            "curves": {case.name: [[_as_json(point) for point in one] for one in curves[case]] for case in cases.ALL},
        },
        picture=draw({case.name: of_case for case, of_case in curves.items()}),
    )


def _curves(seeds: list[int]) -> Curves:
    """Every case with every seed, in processes of one thread each."""
    jobs = [(case, seed) for case in cases.ALL for seed in seeds]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=min(len(jobs), os.cpu_count() or 1), mp_context=context) as pool:
        points = list(pool.map(run, *zip(*jobs, strict=True)))
    curves: Curves = {case: [] for case in cases.ALL}
    for (case, _), of_job in zip(jobs, points, strict=True):
        curves[case].append(of_job)
    return curves


def _row(case: Case, curves: list[list[Point]], gap: float) -> dict[str, Any]:
    last = [points[-1] for points in curves]
    return {
        "case": case.name,
        "staleness": fmean(point.staleness for point in last),
        "trained_rollouts": last[0].trained_rollouts,
        "accuracy": fmean(point.accuracy for point in last),
        "lowest": min(point.accuracy for point in last),
        "highest": max(point.accuracy for point in last),
        "gap": gap,
        "half_way": fmean(points[len(points) // 2].accuracy for points in curves),
    }


def _as_json(point: Point) -> dict[str, float | None]:
    return {
        "trained_rollouts": point.trained_rollouts,
        "accuracy": point.accuracy,
        "reward": point.reward,
        "staleness": point.staleness,
    }
