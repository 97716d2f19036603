"""In which state the hub is, from what it knows in memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from echo_hub.operation.problems import Problem, ProblemKind
from echo_shared.health import Health, HubState

STARTING: Final = "The learner is starting."
NO_NODES: Final = "No node is connected."


def health_of(
    *, is_finished: bool, is_starting: bool, broken: Sequence[str], lacks_nodes: bool, watched: Sequence[Problem]
) -> Health:
    """`broken`: what keeps the hub from training, in words; `watched`: the problems that there are.

    That there is no node makes a hub no worse than live, for however long: what it lacks is its volunteers' to give.
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
