"""Checks of other nodes' completions: the node accepts or declines a check, scores when its engine has time, and
answers once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from echo_node.core.checks import Checks
from echo_node.core.effects import Effect, ScoreCompletion, SendMessage
from echo_shared.sampling.scoring import Scored
from echo_shared.wire.messages import MAX_CHECKS, CheckLease, CheckResult, VersionSpan

HERE = frozenset({0, 3, 4})


def lease(number: int, *versions: int, deadline_s: float = 10.0) -> CheckLease:
    return CheckLease(
        rollout_id=f"{number}-0",
        prompt_ids=np.array([7], np.int32),
        completion_ids=np.arange(len(versions), dtype=np.int32),
        versions=tuple(VersionSpan(policy_version=version, num_tokens=1) for version in versions),
        temperature=1.0,
        deadline_s=deadline_s,
    )


def taken(*leases: CheckLease, **values: Any) -> tuple[Checks, list[Effect]]:
    checks = Checks()
    options = {"can": True, "on_disk": HERE, **values}
    return checks, [effect for one in leases for effect in checks.take(one, 100.0, **options)]


def declined(effects: list[Effect]) -> list[str]:
    results = [effect.message for effect in effects if isinstance(effect, SendMessage)]
    assert all(isinstance(result, CheckResult) and len(result.below) == 0 for result in results)
    return [result.rollout_id for result in results if isinstance(result, CheckResult)]


def started(effects: list[Effect]) -> list[str]:
    return [effect.request.rollout_id for effect in effects if isinstance(effect, ScoreCompletion)]


def scored(number: int) -> Scored:
    return Scored(rollout_id=f"{number}-0", below=np.array([0.5], np.float32), logprobs=np.array([-1], np.float32))


def test_a_check_from_request_to_answer() -> None:
    checks, effects = taken(lease(1, 3, 4))
    assert effects == [] and checks.versions == {3, 4}
    assert started(checks.start({"": frozenset({4})})) == [], "its versions are being loaded"
    (effect,) = checks.start({"": frozenset({3, 4})})
    assert isinstance(effect, ScoreCompletion) and effect.request.versions == ((3, 1), (4, 1))
    assert checks.start({"": frozenset({3, 4})}) == []
    (answer,) = checks.scored(scored(1))
    assert isinstance(answer, SendMessage) and isinstance(answer.message, CheckResult)
    assert answer.message.logprobs.tolist() == [-1.0]
    assert checks.versions == frozenset() and checks.scored(scored(1)) == []


def test_impossible_checks_are_declined_at_once() -> None:
    assert declined(taken(lease(1, 3), can=False)[1]) == ["1-0"]
    assert declined(taken(lease(1, 3, 5))[1]) == ["1-0"], "version 5 is not here"
    assert declined(taken(*(lease(number, 3) for number in range(1, MAX_CHECKS + 3)))[1]) == [
        f"{MAX_CHECKS + 1}-0",
        f"{MAX_CHECKS + 2}-0",
    ]


def test_the_same_again_is_held_already() -> None:
    assert taken(lease(1, 3), lease(1, 3))[1] == []


def test_a_check_that_ended_the_engine_is_not_retried() -> None:
    checks, _ = taken(lease(1, 3), lease(2, 4))
    assert started(checks.start({"": frozenset({3})})) == ["1-0"]
    assert declined(checks.engine_lost("")) == ["1-0"]
    assert checks.start({}) == [], "there is no engine"
    assert started(checks.start({"": HERE})) == ["2-0"]
    assert declined(checks.give_up()) == ["2-0"]


def test_overdue_checks_are_dropped() -> None:
    checks, _ = taken(lease(1, 3, deadline_s=5.0), lease(2, 4))
    checks.overdue(105.0)
    assert checks.versions == {3, 4}
    checks.overdue(105.1)
    assert checks.versions == {4}


def test_a_hub_that_waits_for_nothing_or_comes_again_gives_the_engine_no_more() -> None:
    checks, _ = taken(*(lease(number, 3, deadline_s=1.0) for number in range(MAX_CHECKS)))
    assert len(started(checks.start({"": HERE}))) == MAX_CHECKS
    checks.overdue(102.0)
    one_more = lease(100, 3)
    assert declined(checks.take(one_more, 102.0, can=True, on_disk=HERE)) == ["100-0"], (
        "the engine still holds all of them"
    )
    assert checks.scored(scored(0)) == [], "the check is overdue"
    assert checks.take(one_more, 102.0, can=True, on_disk=HERE) == []
    assert started(checks.start({"": HERE})) == ["100-0"]
    assert declined(checks.give_up()) == ["100-0"]
    assert declined(checks.take(lease(101, 3), 103.0, can=True, on_disk=HERE)) == ["101-0"]
    assert checks.engine_lost("") == []
    assert checks.take(lease(101, 3), 103.0, can=True, on_disk=HERE) == []
