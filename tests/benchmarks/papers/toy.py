"""Invented runs."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.learning.virtual_run import Point
from benchmarks.papers.ran import Ran


def ran(*accuracies: float, norms: Sequence[float] = (1.0, 1.0)) -> Ran:
    """Return a run with these points and steps."""
    return Ran(
        points=[
            Point(trained_rollouts=number, reward=None, accuracy=accuracy, staleness=0.0)
            for number, accuracy in enumerate(accuracies)
        ],
        steps=[{"mean_reward": 0.5, "grad_norm": norm, "completion_tokens": 4.0} for norm in norms],
        utilisation=0.5,
        seconds=1.0,
    )
