from __future__ import annotations

from collections.abc import Callable

import pytest

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.learner.objectives.base import ObjectiveTokens
from echo_hub.learner.objectives.dapo import Dapo
from echo_hub.learner.objectives.registry import make_objective


def test_dapo_recipe() -> None:
    settings = ObjectiveConfig(name="dapo")
    assert make_objective(settings) == Dapo(clip_low=0.2, clip_high=0.28)
    assert (settings.resolved().aggregation, settings.resolved().advantage) == ("token_mean", "mean_std")


def test_dapo_clips_higher(make_tokens: Callable[..., ObjectiveTokens], check_gradient: Callable[..., None]) -> None:
    dapo = Dapo(clip_low=0.2, clip_high=0.28)
    losses = dapo.losses(make_tokens([1.25, 1.5, 0.5], [2.0, 2.0, -2.0])).losses_N
    assert losses.tolist() == pytest.approx([-2.5, -2.56, 1.6])
    check_gradient(dapo, [1.25, 1.5, 0.5, 0.9], [1.0, 1.0, -1.0, -1.0])
