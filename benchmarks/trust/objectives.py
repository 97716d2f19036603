"""What it costs to bound every token's weight where nobody forges: the default objective beside plain GRPO.

Whole runs of the built-in model by the hub's own coordinator and learner, honest and as old as the staleness bound
allows (`benchmarks.learning.virtual_run`), three seeds each. `robust_default_cost`: held-out accuracy after the last
step by GRPO, which was the default before, less that by the default, means over the seeds.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from statistics import fmean
from typing import Any, Final

from benchmarks.learning.cases import Case
from benchmarks.learning.virtual_run import run
from benchmarks.progress import Planned, Progress
from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.training_sections import TrainingConfig

SEEDS: Final = 3
SECONDS: Final = 30.0
"""About, of one run, two beside each other."""
_STALENESS: Final = TrainingConfig().max_staleness
BEFORE: Final = Case(name="grpo", mode="async", max_staleness=_STALENESS, objective={"name": "grpo"})
DEFAULT: Final = Case(name=ObjectiveConfig().name, mode="async", max_staleness=_STALENESS)


def plan() -> list[Planned]:
    return [Planned(name=_name(case, number), seconds=SECONDS) for number in range(SEEDS) for case in (BEFORE, DEFAULT)]


def measure(progress: Progress, *, seed: int) -> list[dict[str, Any]]:
    """One row a run."""
    wanted = {
        _name(case, number): (case, SEEDS * seed + number)
        for number in range(SEEDS)
        for case in (BEFORE, DEFAULT)
        if progress.wants(_name(case, number))
    }
    if not wanted:
        return []
    rows = []
    workers = max(1, min(len(wanted), os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(run, *each): name for name, each in wanted.items()}
        for future in as_completed(running):
            name = running[future]
            rows.append({"case": name, "objective": wanted[name][0].name, "learned": future.result()[-1].accuracy})
            progress.done(name, {"learned": rows[-1]["learned"]})
    return rows


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Nothing, unless both were run."""
    learned = {
        case.name: [row["learned"] for row in rows if row["objective"] == case.name] for case in (BEFORE, DEFAULT)
    }
    if not all(learned.values()):
        return {}
    return {"robust_default_cost": fmean(learned[BEFORE.name]) - fmean(learned[DEFAULT.name])}


def _name(case: Case, number: int) -> str:
    return f"objective {case.name}, seed {number + 1} of {SEEDS}"
