"""Compute the hub's state of health from data in memory. Pure: no input or output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from echo_hub.operation.problems import ProblemKind, RunProblem
from echo_shared.records.health import Health, HubState

STARTING: Final = "The learner is starting."
NO_NODES: Final = "No node is connected."


def health_of(
    *, is_finished: bool, is_starting: bool, broken: Sequence[str], lacks_nodes: bool, watched: Sequence[RunProblem]
) -> Health:
    """Return the hub's health. `broken` holds texts of failures that stop training. `watched` holds the current
    problems.

    A hub without nodes is live, not degraded, because only volunteers can bring nodes back.
    """
    if is_finished:
        disk = tuple(problem.text for problem in watched if problem.kind is ProblemKind.DISK)
        return Health(state=HubState.DEGRADED if disk else HubState.FINISHED, reasons=disk)
    others = [problem.text for problem in watched if problem.kind is not ProblemKind.NO_NODES]
    wrong = tuple(dict.fromkeys((*broken, *others)))
    if wrong:
        return Health(state=HubState.DEGRADED, reasons=wrong)
    if is_starting:
        return Health(state=HubState.STARTING, reasons=(STARTING,))
    if lacks_nodes:
        return Health(state=HubState.LIVE, reasons=(NO_NODES,))
    return Health(state=HubState.READY)
