from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from echo_hub.core.accounting.arrivals import unlike_lease

FOR_LEARNER: Any = SimpleNamespace(for_learner=True)
BESIDE: Any = SimpleNamespace(for_learner=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"problem": "its beginning differs"}, "its beginning differs"),
        ({"lease_id": 99}, "lease 99 instead of 1"),
        ({"group_id": 7, "index": 5}, "group 7 instead of 0, index 5 instead of 0"),
        ({"policy_version_end": 3}, "last policy version 3 instead of 0"),
    ],
)
def test_contradictions_with_the_lease_are_named(bench: Callable[..., Any], changes: dict[str, Any], said: str) -> None:
    b = bench()
    b.node("a")
    rollout = b.coordinator._ledger.rollouts["1-0"]
    event = replace(b.arrival(b.leases[1], 0), **changes)
    assert unlike_lease(event, rollout, owner=FOR_LEARNER, newest=None) == said


def test_only_training_rollouts_may_continue_with_a_newer_version(bench: Callable[..., Any]) -> None:
    b = bench()
    b.node("a")
    rollout = b.coordinator._ledger.rollouts["1-0"]
    event = replace(b.arrival(b.leases[1], 0), policy_version_end=2)
    assert unlike_lease(event, rollout, owner=FOR_LEARNER, newest=2) == ""
    assert "newest published 1" in unlike_lease(event, rollout, owner=FOR_LEARNER, newest=1)
    assert unlike_lease(event, rollout, owner=BESIDE, newest=2) == "last policy version 2 instead of 0"
