from __future__ import annotations

import pytest

from echo_hub.config.objective_change import ObjectiveRules, as_text
from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.sections import HubConfig

RULES = ObjectiveRules(HubConfig(objective=ObjectiveConfig(clip_high=0.2)))
BEFORE = as_text(RULES.config.objective)


def test_the_previous_values_undo_a_change_and_others_stay() -> None:
    changed, was, now = RULES(BEFORE, "kl_coefficient=0.01 objective.cap=3")
    assert ObjectiveConfig.model_validate_json(changed) == ObjectiveConfig(clip_high=0.2, kl_coefficient=0.01, cap=3)
    assert (was, now) == ("kl_coefficient=0.0 cap=0.0", "kl_coefficient=0.01 cap=3.0")
    assert RULES(changed, was)[0] == BEFORE


def test_a_target_for_the_entropy_comes_and_goes() -> None:
    changed, was, _ = RULES(BEFORE, "entropy_target=0.3 entropy_delta=0.001")
    assert ObjectiveConfig.model_validate_json(changed).entropy_target == 0.3
    assert RULES(changed, was)[0] == BEFORE


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("entropy_delta=0.001", "entropy_delta needs entropy_target"),
        ("clip_high", "is not NAME=VALUE"),
        ("temperature=1", "which has name, clip_low"),
        ("clip_low=fast", "clip_low: Input should be a valid number"),
        ("clip_low=1", "less than 1"),
        ("cap=1.1", "needs cap > 1"),
        ("name=cispo", "cispo does not use clip_high"),
        ("aggregation=token_mean", "training.tokens_per_step"),
        ("overlong=mask", "objective.overlong cannot change in a run .keep to mask.*echo-hub fork"),
        ("advantage=batch_std", "objective.advantage cannot change"),
        ("kl_coefficient=0.1 reference=start", "without model.start_from"),
    ],
)
def test_a_change_that_does_not_fit_the_run_is_refused_with_the_reason(wanted: str, why: str) -> None:
    tokens = RULES.config.training.model_copy(update={"tokens_per_step": 4096})
    rules = ObjectiveRules(RULES.config.model_copy(update={"training": tokens}))
    with pytest.raises(ValueError, match=why):
        rules(BEFORE, wanted)
