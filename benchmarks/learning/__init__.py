"""Cost of staleness in learning, and gain of a corrected objective: held-out accuracy against trained rollouts.

Each case trains the built-in model on additions, with as many rollouts as every other case, three seeds each, by the
hub's own coordinator and learner. See `virtual_run` for how rollouts get old.

Cases of a real fleet (`fleet_run`) train the second built-in model, whose completions are long and unequal, on unequal
machines and engines. These cases compare trained rollouts with requested rollouts, and count lost tokens.
"""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import Any, Final

from benchmarks.harness.pool import each
from benchmarks.harness.progress import Measurement, Planned, Progress
from benchmarks.learning import fleet_run, virtual_run
from benchmarks.learning.fleet_run import FleetFigures
from benchmarks.learning.virtual_run import Case, Point, run

DESCRIPTION: Final = (
    "Held-out accuracy at equal trained rollouts: co-located, sequential, asynchronous by staleness bound"
)
SEEDS: Final = 3
RUN_S: Final = 60.0
"""Expected seconds of one run, while two run in parallel on two cores."""
FLEET_S: Final = 300.0
"""Expected seconds of a fleet's run. Such a case has one seed."""

Curves = dict[Case, list[list[Point]]]
"""For each case, one curve (list of points) per seed."""


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
            "fleet_length_bias": max((figures.length_bias for figures in fleets.values()), default=None),
            "fleet_reward_bias": max((abs(figures.reward_bias) for figures in fleets.values()), default=None),
            "fleet_lost_share": max((figures.lost_share for figures in fleets.values()), default=None),
        },
        rows=[
            *(_row(case, of_case, gap.get(case)) for case, of_case in curves.items()),
            *({"case": case.name, **asdict(figures)} for case, figures in fleets.items()),
        ],
        conditions={
            "seeds": SEEDS,
            "curves": {case.name: [[asdict(point) for point in one] for one in ran] for case, ran in curves.items()},
        },
    )


def _curves(seed: int, progress: Progress) -> Curves:
    """Run every wanted case with every wanted seed, seed by seed, in processes of one thread."""
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


def _fleets(seed: int, progress: Progress) -> dict[Case, FleetFigures]:
    """Run every wanted case of a fleet in parallel, in processes of one thread."""
    wanted = {case.name: case for case in virtual_run.FLEET if progress.wants(case.name)}
    found: dict[str, FleetFigures] = {}
    configs = {name: (case.config(seed), fleet_run.recorded_nodes()) for name, case in wanted.items()}
    for name, figures in each(fleet_run.run, configs, workers=len(wanted)):
        found[name] = figures
        progress.done(name, asdict(figures))
    return {case: found[name] for name, case in wanted.items()}


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
