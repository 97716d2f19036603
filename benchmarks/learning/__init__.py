"""Cost of staleness in learning, and gain from an objective that corrects for staleness: held-out accuracy over trained
rollouts.

Each case trains the built-in model on additions, with the hub's own coordinator and learner. All cases train on the
same number of rollouts, with three seeds each. `virtual_run` explains how rollouts become stale.

The cases of a real fleet (`fleet_run`) train the second built-in model, whose completions are long and differ in
length, on machines and engines that differ too. These cases compare trained rollouts with requested rollouts, and count
lost tokens.
"""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import Any, Final

from benchmarks.harness.pool import each
from benchmarks.harness.progress import Measurement, Planned, Progress, most
from benchmarks.learning import fleet_run, virtual_run
from benchmarks.learning.virtual_run import Case, Point, run

DESCRIPTION: Final = (
    "Held-out accuracy at equal trained rollouts: co-located, sequential, asynchronous by staleness bound"
)
SEEDS: Final = 3
RUN_S: Final = 60.0
"""Expected seconds of one run, if two run in parallel on two cores."""
FLEET_S: Final = 300.0
"""Expected seconds of a run of a fleet's case, which has one seed."""

Curves = dict[Case, list[list[Point]]]
"""For each case, one learning curve (list of points) per seed."""


def plan() -> list[Planned]:
    runs = [Planned(name=_name(case, number), seconds=RUN_S / 2) for number in range(SEEDS) for case in virtual_run.ALL]
    fleets = [Planned(name=case.name, seconds=FLEET_S / len(virtual_run.FLEET)) for case in virtual_run.FLEET]
    return runs + fleets


def measure(seed: int, progress: Progress) -> Measurement:
    curves = _curves(seed, progress)
    fleets = _fleets(seed, progress)
    final = {case: fmean(points[-1].accuracy for points in of_case) for case, of_case in curves.items()}
    colocated = final.get(virtual_run.COLOCATED)
    gap = {} if colocated is None else {case: colocated - accuracy for case, accuracy in final.items()}
    of_bounds = [gap[case] for bound, case in virtual_run.BY_STALENESS.items() if bound <= 4 and case in gap]
    corrected = [gap[case] for case in virtual_run.CORRECTED_8 if case in gap]
    return Measurement(
        headline={
            "sequential_gap": gap.get(virtual_run.SEQUENTIAL),
            "async_le_4_gap": max(of_bounds, default=None),
            "async_8_corrected_gap": min(corrected, default=None),
            "fleet_length_bias": most(fleets, "length_bias"),
            "fleet_reward_bias": max((abs(row["reward_bias"]) for row in fleets), default=None),
            "fleet_lost_share": most(fleets, "lost_share"),
        },
        rows=[*(_row(case, of_case, gap.get(case)) for case, of_case in curves.items()), *fleets],
        conditions={
            "seeds": SEEDS,
            "curves": {case.name: [[asdict(point) for point in one] for one in ran] for case, ran in curves.items()},
        },
    )


def _curves(seed: int, progress: Progress) -> Curves:
    """Run every wanted case once for each seed, in processes with one thread each. All cases of a seed come before the
    next seed.
    """
    wanted = {
        _name(case, number): (case, SEEDS * seed + number)
        for number in range(SEEDS)
        for case in virtual_run.ALL
        if progress.wants(_name(case, number))
    }
    found: dict[str, list[Point]] = {}
    for name, points in each(run, wanted):
        found[name] = points
        progress.done(name, {"accuracy": points[-1].accuracy, "trained_rollouts": points[-1].trained_rollouts})
    curves: Curves = {}
    for name, (case, _) in wanted.items():
        curves.setdefault(case, []).append(found[name])
    return curves


def _fleets(seed: int, progress: Progress) -> list[dict[str, Any]]:
    """Run every wanted case of a fleet in parallel, in processes with one thread each. Return their rows."""
    wanted = [case for case in virtual_run.FLEET if progress.wants(case.name)]
    rows = []
    configs = {case.name: (case.config(seed), fleet_run.recorded_nodes()) for case in wanted}
    for name, figures in each(fleet_run.run, configs, workers=len(wanted)):
        rows.append({"case": name, **figures})
        progress.done(name, figures)
    return rows


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
