"""Invented results of runs, and small versions of the cases in `benchmarks.papers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness.site import merged
from benchmarks.learning.virtual_run import Point
from benchmarks.papers.runs import Case, Ran

SIZES = {"training": {"steps": 1, "groups_per_step": 2, "group_size": 2}, "evaluation": {"problems": 4}}


def ran(*accuracies: float, norms: Sequence[float] = (1.0, 1.0)) -> Ran:
    return Ran(
        points=[
            Point(trained_rollouts=number, reward=None, accuracy=accuracy, staleness=0.0)
            for number, accuracy in enumerate(accuracies)
        ],
        steps=[{"mean_reward": 0.5, "grad_norm": norm} for norm in norms],
    )


def smaller(case: Case, sizes: Mapping[str, Mapping[str, Any]] = SIZES, **training: int) -> Case:
    """Return the case with smaller settings (`sizes` by section, and `training`) that evaluates every step."""
    settings = merged(merged(case.settings, sizes), {"training": training})
    return replace(case, settings=settings, evaluate_every=1)
