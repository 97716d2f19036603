from __future__ import annotations

from typing import Any

import pytest

from echo_hub.operation.problems import ProblemKind, RunProblem
from echo_hub.operation.state import NO_NODES, STARTING, health_of
from echo_shared.records.health import HubState

WELL: dict[str, Any] = {
    "is_finished": False,
    "is_starting": False,
    "broken": (),
    "lacks_nodes": False,
    "watched": (),
}
DISK = RunProblem(kind=ProblemKind.DISK, text="The disk is full.", since=1.0)
ALONE = RunProblem(kind=ProblemKind.NO_NODES, text="No node for an hour.", since=1.0)


@pytest.mark.parametrize(
    ("facts", "state", "reasons"),
    [
        ({}, HubState.READY, ()),
        ({"lacks_nodes": True}, HubState.LIVE, (NO_NODES,)),
        ({"lacks_nodes": True, "watched": (ALONE,)}, HubState.LIVE, (NO_NODES,)),
        ({"is_starting": True, "lacks_nodes": True}, HubState.STARTING, (STARTING,)),
        ({"broken": ("It has died.",), "is_starting": True}, HubState.DEGRADED, ("It has died.",)),
        ({"watched": (DISK, ALONE)}, HubState.DEGRADED, (DISK.text,)),
        ({"broken": (DISK.text,), "watched": (DISK,)}, HubState.DEGRADED, (DISK.text,)),
        ({"is_finished": True, "lacks_nodes": True, "broken": ("It has died.",)}, HubState.FINISHED, ()),
        ({"is_finished": True, "watched": (DISK,)}, HubState.DEGRADED, (DISK.text,)),
    ],
)
def test_the_state_in_a_word_and_why(facts: dict[str, Any], state: HubState, reasons: tuple[str, ...]) -> None:
    health = health_of(**{**WELL, **facts})
    assert (health.state, health.reasons) == (state, reasons)
