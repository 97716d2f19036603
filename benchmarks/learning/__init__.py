"""What staleness costs in learning, and what a corrected objective gives back: reward against trained rollouts.

Each case trains the built-in model on additions with as many rollouts as every other, three seeds each, through the
hub's own coordinator and learner; see `virtual_run` for how rollouts grow old.

Those of a real fleet (`fleet_run`) train the second built-in model, whose completions are long and unequal, by unequal
machines and engines; they tell whether what was trained is what was asked for, and how much was lost on the way.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from statistics import fmean
from typing import Any, Final

from benchmarks.harness.measurement import Measurement
from benchmarks.harness.progress import Planned, Progress
from benchmarks.learning import cases, fleet_run, recording
from benchmarks.learning.cases import Case
from benchmarks.learning.fleet_run import FleetFigures
from benchmarks.learning.plot import draw
from benchmarks.learning.virtual_run import Point, run

DESCRIPTION: Final = (
    "Held-out accuracy at equal trained rollouts: co-located, sequential, asynchronous by staleness bound"
)
SEEDS: Final = 3
MOST_S: Final = 1_800.0
"""After which only runs of the first seed begin."""
RUN_S: Final = 60.0
"""About, of one run, one of two beside each other on two cores of a server."""
FLEET_S: Final = 300.0
"""The same of a fleet's; each has one seed."""

Curves = dict[Case, list[list[Point]]]
"""One list of points a seed."""


def plan() -> list[Planned]:
    runs = [Planned(name=_name(case, number), seconds=RUN_S / 2) for number in range(SEEDS) for case in cases.ALL]
    fleets = [Planned(name=case.name, seconds=FLEET_S / len(cases.FLEET)) for case in cases.FLEET]
    return runs + fleets


def measure(seed: int, progress: Progress) -> Measurement:
    curves = _curves(seed, progress)
    fleets = _fleets(seed, progress)
    final = {case: fmean(points[-1].accuracy for points in of_case) for case, of_case in curves.items()}
    colocated = final.get(cases.COLOCATED)
    gap = {case: None if colocated is None else colocated - accuracy for case, accuracy in final.items()}
    found = {case: value for case, value in gap.items() if value is not None}
    return Measurement(
        headline={
            "sequential_gap": found.get(cases.SEQUENTIAL),
            "async_le_4_gap": max(
                (found[case] for bound, case in cases.BY_STALENESS.items() if bound <= 4 and case in found),
                default=None,
            ),
            "async_8_corrected_gap": min((found[case] for case in cases.CORRECTED_8 if case in found), default=None),
            "fleet_length_bias": max((figures.length_bias for figures in fleets.values()), default=None),
            "fleet_reward_bias": max((abs(figures.reward_bias) for figures in fleets.values()), default=None),
            "fleet_lost_share": max((figures.lost_share for figures in fleets.values()), default=None),
        },
        rows=[
            *(_row(case, of_case, gap[case]) for case, of_case in curves.items()),
            *(row for case, figures in fleets.items() for row in _fates(case, figures)),
        ],
        conditions={
            "steps": cases.COLOCATED.steps,
            "rollouts_per_step": cases.COLOCATED.groups_per_step * cases.COLOCATED.group_size,
            "seeds": SEEDS,
            "curves": {case.name: [[_as_json(point) for point in one] for one in ran] for case, ran in curves.items()},
        },
        picture=draw({case.name: of_case for case, of_case in curves.items()}) if curves else None,
    )


def _curves(seed: int, progress: Progress) -> Curves:
    """Every wanted case with every wanted seed, in processes of one thread each: one seed after the other."""
    wanted = [(case, number) for number in range(SEEDS) for case in cases.ALL if progress.wants(_name(case, number))]
    runs: dict[tuple[Case, int], list[Point]] = {}
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(len(wanted), os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        running = {pool.submit(run, case, SEEDS * seed + number): (case, number) for case, number in wanted}
        for future in as_completed(running):
            case, number = running[future]
            if future.cancelled():
                progress.leave_out(_name(case, number), f"{MOST_S:.0f} s had passed: fewer seeds")
                continue
            points = runs[case, number] = future.result()
            progress.done(
                _name(case, number), {"accuracy": points[-1].accuracy, "trained_rollouts": points[-1].trained_rollouts}
            )
            if progress.elapsed_s > MOST_S:
                for other, (_, repetition) in running.items():
                    if repetition:
                        other.cancel()
    of_case = {case: [runs[one] for one in wanted if one[0] is case and one in runs] for case in cases.ALL}
    return {case: found for case, found in of_case.items() if found}


def _fleets(seed: int, progress: Progress) -> dict[Case, FleetFigures]:
    """Every wanted case of a fleet, beside each other, in processes of one thread each."""
    wanted = [case for case in cases.FLEET if progress.wants(case.name)]
    found: dict[Case, FleetFigures] = {}
    if wanted:
        with ProcessPoolExecutor(len(wanted), mp_context=multiprocessing.get_context("spawn")) as pool:
            nodes = recording.load()
            running = {pool.submit(fleet_run.run, case.config(seed), nodes): case for case in wanted}
            for future in as_completed(running):
                case, figures = running[future], future.result()
                found[case] = figures
                before, after = (figures.points[place].accuracy for place in (0, -1))
                biases = {"length_bias": figures.length_bias, "reward_bias": figures.reward_bias}
                told = {**biases, "lost_share": figures.lost_share}
                progress.done(case.name, {**told, "accuracy_before": before, "accuracy_after": after})
    return {case: found[case] for case in wanted}


def _fates(case: Case, figures: FleetFigures) -> list[dict[str, Any]]:
    lengths = {"shortest_tokens": figures.shortest, "longest_tokens": figures.longest}
    return [
        {
            "case": f"{case.name}, {fate.outcome}",
            "rollouts": fate.rollouts,
            "mean_tokens": fate.tokens,
            "mean_reward": fate.reward,
            **(lengths if fate.outcome == fleet_run.TRAINED else {}),
        }
        for fate in figures.fates
    ]


def _name(case: Case, number: int) -> str:
    return f"{case.name}, seed {number + 1} of {SEEDS}"


def _row(case: Case, curves: list[list[Point]], gap: float | None) -> dict[str, Any]:
    last = [points[-1] for points in curves]
    return {
        "case": case.name,
        "staleness": fmean(point.staleness for point in last),
        "trained_rollouts": last[0].trained_rollouts,
        "seeds": len(curves),
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
