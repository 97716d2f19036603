from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from echo_hub.evaluation.by_hub import Episode, HeldOut
from echo_hub.evaluation.differences import Difference, NotingShares, SolvedShares, differences
from echo_hub.tasks.rewards import RewardBounds
from echo_shared.records.run import EvaluationKind

HELDOUT = HeldOut(
    prompts=(), run_seed=0, samples=2, temperature=1.0, max_tokens=4, stop_ids=(), rewards=RewardBounds(), weight=3.0
)


def shares(version: int, *by_problem: float, name: str = "", weight: float = 1.0) -> SolvedShares:
    return SolvedShares(
        policy_version=version,
        name=name,
        weight=weight,
        kind=EvaluationKind.GREEDY,
        samples=1,
        shares=dict(enumerate(by_problem)),
        rewards={number: share / 4 for number, share in enumerate(by_problem)},
    )


def test_the_error_is_that_of_the_paired_differences() -> None:
    before, after = (0.0, 0.25, 1.0, 0.5), (1.0, 1.0, 0.75, 0.5)
    between = shares(4, 0.0, 0.0, 0.0, 0.0)
    (found,) = differences([shares(8, *after), between, shares(0, *before)])
    assert (found.policy_version, found.earlier_version) == (8, 0), "in any order"
    paired = [1.0, 0.75, -0.25, 0.0]
    assert found.difference == pytest.approx(np.mean(paired))
    assert found.error == pytest.approx(np.std(paired, ddof=1) / math.sqrt(4))
    assert (found.reward_difference, found.reward_error) == pytest.approx((found.difference / 4, found.error / 4))
    assert (found.num_better, found.num_worse, found.num_equal) == (2, 1, 1)


def test_only_problems_that_both_versions_have_are_compared() -> None:
    def of(version: int, by_problem: dict[int, float]) -> SolvedShares:
        return replace(shares(version), shares=by_problem, rewards=by_problem)

    lacking = of(0, {1: 0.0, 2: 1.0, 3: 0.0})
    (found,) = differences([lacking, of(1, {0: 1.0, 1: 1.0, 2: 1.0})])
    assert (found.difference, found.num_better, found.num_worse, found.num_equal) == (0.5, 1, 0, 1)
    assert differences([lacking, of(1, {0: 1.0})]) == []


def test_a_single_version_is_not_compared() -> None:
    assert differences([shares(3, 1.0), shares(3, 0.0, name="hard")]) == []


def test_several_sets_are_weighted_like_the_runs_accuracy() -> None:
    def of(version: int, easy: tuple[float, ...], hard: tuple[float, ...]) -> list[SolvedShares]:
        exam = shares(version, 1.0, name="exam", weight=0.0)
        return [shares(version, *easy, name="easy", weight=3.0), shares(version, *hard, name="hard"), exam]

    whole, easy, hard, exam = differences([*of(0, (0.0, 0.0), (1.0, 1.0)), *of(2, (1.0, 0.0), (1.0, 0.0))])
    assert [one.label for one in (whole, easy, hard, exam)] == [
        *("greedy", "easy, greedy", "hard, greedy", "exam, greedy")
    ]
    assert (easy.difference, hard.difference, exam.difference) == (0.5, -0.5, 0.0)
    assert whole.difference == pytest.approx((3 * 0.5 - 0.5) / 4)
    assert whole.error == pytest.approx(math.hypot(3 * easy.error, hard.error) / 4)
    assert (whole.num_better, whole.num_worse, whole.num_equal) == (1, 1, 2), "a set of weight 0 is in no mean"


def test_a_problems_samples_are_averaged_first() -> None:
    found: list[SolvedShares] = []
    rewards = {0: (1.0, 0.5), 1: (1.0, None), 2: (None, None)}
    episodes = [
        Episode(number=number, index=index, prompt_ids=np.array([1], np.int32), reward=reward)
        for number, of_problem in rewards.items()
        for index, reward in enumerate(of_problem)
    ]
    NotingShares(5, found).finished(replace(HELDOUT, name="hard"), EvaluationKind.SAMPLED, episodes)
    (one,) = found
    assert (one.policy_version, one.name, one.weight, one.kind) == (5, "hard", 3.0, EvaluationKind.SAMPLED)
    assert (one.samples, one.shares) == (2, {0: 0.5, 1: 1.0})
    assert one.rewards == {0: 0.75, 1: 1.0}


FOUND = Difference(
    name="",
    policy_version=8,
    earlier_version=0,
    kind=EvaluationKind.SAMPLED,
    samples=4,
    difference=0.5156,
    error=0.0412,
    reward_difference=0.6,
    reward_error=0.05,
    num_better=41,
    num_worse=2,
    num_equal=21,
)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            replace(FOUND, num_equal=0),
            "Version 8 solves 51.6 percentage points more than the base (± 4.1; 41 problems better, 2 worse, 0 equal).",
        ),
        (
            replace(FOUND, earlier_version=3, difference=-0.02, num_better=1),
            "Version 8 solves 2.0 percentage points less than version 3 (± 4.1; 1 problem better, 2 worse, 21 equal).",
        ),
        (
            replace(FOUND, difference=-0.0004),
            "Version 8 solves as much as the base (± 4.1; 41 problems better, 2 worse, 21 equal).",
        ),
    ],
)
def test_a_difference_is_a_sentence(found: Difference, text: str) -> None:
    assert (found.text, found.label) == (text, "mean@4")
