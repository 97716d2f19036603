from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.learner.objectives.cispo import Cispo
from echo_hub.learner.objectives.grpo import Grpo
from echo_hub.learner.objectives.gspo import Gspo
from echo_hub.learner.objectives.registry import make_objective
from echo_hub.learner.objectives.sapo import Sapo
from echo_hub.learner.objectives.two_sided import TwoSided


@pytest.mark.parametrize(
    ("settings", "objective"),
    [
        ({"name": "grpo"}, Grpo(clip_low=0.2, clip_high=0.2)),
        ({"name": "grpo", "clip_high": 0.3}, Grpo(clip_low=0.2, clip_high=0.3)),
        ({"name": "gspo"}, Gspo(clip_low=3e-4, clip_high=4e-4)),
        ({"name": "cispo", "cap": 8.0}, Cispo(cap=8.0)),
        ({"name": "sapo"}, Sapo()),
        ({"name": "two_sided", "cap": 3.0}, TwoSided(clip_low=0.2, clip_high=0.2, cap=3.0)),
    ],
)
def test_numbers_default_to_the_papers(settings: dict[str, Any], objective: object) -> None:
    assert make_objective(ObjectiveConfig(**settings)) == objective


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"name": "grpo", "cap": 3.0}, "grpo does not use cap"),
        ({"name": "cispo", "clip_high": 0.3}, "cispo does not use clip_high"),
        ({"name": "sapo", "clip_low": 0.1, "cap": 2.0}, "sapo does not use clip_low, cap"),
        ({"name": "aipo", "old_policy": "proximal"}, "remove old_policy"),
        ({"name": "decoupled_ppo", "old_policy": "proximal"}, "remove old_policy"),
        ({"name": "two_sided", "cap": 1.2}, "cap > 1 \\+ clip_high"),
        ({"name": "two_sided", "clip_high": 3.5}, "cap > 1 \\+ clip_high"),
        ({"name": "cispo", "cap": 0.1}, "cispo needs cap >= 1"),
        ({"name": "aipo", "cap": 0.99}, "aipo needs cap >= 1"),
        ({"name": "decoupled_ppo", "cap": 0.5}, "decoupled_ppo needs cap > 1"),
        ({"name": "decoupled_ppo", "cap": 1.0}, "decoupled_ppo needs cap > 1"),
        ({"correction": "tis"}, 'needs old_policy = "proximal"'),
        ({"old_policy": "proximal", "correction": "tis", "correction_low": 0.1}, "does not use correction_low"),
        ({"correction_high": 3.0}, "does not use correction_high"),
        ({"overlong": "penalty"}, "overlong_buffer_tokens > 0"),
        ({"overlong": "mask", "overlong_buffer_tokens": 4}, "overlong_buffer_tokens > 0"),
    ],
)
def test_unused_or_invalid_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        ObjectiveConfig(**settings)


def test_explicit_choices_go_over_the_papers() -> None:
    settings = ObjectiveConfig(name="dr_grpo", advantage="leave_one_out").resolved()
    assert (settings.aggregation, settings.advantage) == ("constant", "leave_one_out")
    assert settings.resolved() == settings
