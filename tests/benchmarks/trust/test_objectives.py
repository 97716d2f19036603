"""Other settings of the objective, compared with the default under attack."""

from __future__ import annotations

import pytest

from benchmarks.trust import objectives
from benchmarks.trust.objectives import BEFORE, DEFAULT, SEEDS


def test_the_default_is_compared_with_grpo_seed_by_seed() -> None:
    assert BEFORE.config(3).objective.name == "grpo"
    assert DEFAULT.config(3).objective.name == "two_sided"
    assert BEFORE.config(3).training == DEFAULT.config(3).training
    assert len({planned.name for planned in objectives.plan()}) == 2 * SEEDS


def test_the_cost_is_of_means_and_unknown_without_both() -> None:
    before = [{"objective": "grpo", "learned": learned} for learned in (0.5, 0.7)]
    default = [{"objective": "two_sided", "learned": learned} for learned in (0.6, 0.5)]
    assert objectives.headline([*before, *default]) == {"robust_default_cost": pytest.approx(0.05)}
    assert objectives.headline(before) == objectives.headline([]) == {}
