from __future__ import annotations

from collections.abc import Callable

import pytest

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.learner.objectives.base import ObjectiveTokens
from echo_hub.learner.objectives.dr_grpo import DrGrpo
from echo_hub.learner.objectives.registry import make_objective


def test_dr_grpo_recipe() -> None:
    settings = ObjectiveConfig(name="dr_grpo")
    assert make_objective(settings) == DrGrpo(clip_low=0.2, clip_high=0.2)
    assert (settings.resolved().aggregation, settings.resolved().advantage) == ("constant", "mean")


def test_loss_by_hand(make_tokens: Callable[..., ObjectiveTokens]) -> None:
    losses = DrGrpo(clip_low=0.2, clip_high=0.2).losses(make_tokens([1.5, 0.5], [2.0, -2.0])).losses_N
    assert losses.tolist() == pytest.approx([-2.4, 1.6])
