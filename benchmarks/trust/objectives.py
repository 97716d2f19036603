"""Cost of an objective that bounds the weight of every token, in runs without forgers: the default objective compared
with plain GRPO.

The hub's own coordinator and learner train the built-in model in complete runs, with three seeds each. All rollouts are
honest, and as old as the staleness bound allows (`benchmarks.learning.virtual_run`). `robust_default_cost` is the
held-out accuracy after the last step of GRPO, minus that of the default, as means over the seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from benchmarks.harness.pool import each
from benchmarks.harness.progress import Planned, Progress
from benchmarks.learning.virtual_run import Case, run, stale
from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.training_sections import TrainingConfig

SEEDS: Final = 3
SECONDS: Final = 30.0
_STALENESS: Final = TrainingConfig().max_staleness
BEFORE: Final = Case(name="grpo", settings=stale(_STALENESS, objective={"name": "grpo"}))
DEFAULT: Final = Case(name=ObjectiveConfig().name, settings=stale(_STALENESS))
RUNS: Final = {
    f"objective {case.name}, seed {number + 1} of {SEEDS}": (case, number)
    for number in range(SEEDS)
    for case in (BEFORE, DEFAULT)
}


def plan() -> list[Planned]:
    return [Planned(name=name, seconds=SECONDS) for name in RUNS]


def measure(progress: Progress, *, seed: int) -> list[dict[str, Any]]:
    rows = []
    wanted = {name: (case, SEEDS * seed + number) for name, (case, number) in RUNS.items() if progress.wants(name)}
    for name, points in each(run, wanted):
        rows.append({"case": name, "objective": wanted[name][0].name, "learned": points[-1].accuracy})
        progress.done(name, {"learned": rows[-1]["learned"]})
    return rows


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the benchmark's headline figure: how much less the default objective learns than `BEFORE`. Empty unless
    both objectives were run.
    """
    learned = {
        case.name: [row["learned"] for row in rows if row["objective"] == case.name] for case in (BEFORE, DEFAULT)
    }
    if not all(learned.values()):
        return {}
    return {"robust_default_cost": fmean(learned[BEFORE.name]) - fmean(learned[DEFAULT.name])}
