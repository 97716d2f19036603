"""What a run keeps from its first day."""

from __future__ import annotations

import json

import pytest

from echo_hub.config.sections import EvaluationConfig, HubConfig
from echo_hub.opening import _check_unchanged
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError


def test_held_out_problems_are_fixed_for_the_training_prompts_avoid_them() -> None:
    store = Store.open("sqlite://")
    _check_unchanged(store, HubConfig(), "")
    _check_unchanged(store, HubConfig(), "")
    with pytest.raises(ConfigError, match=r"evaluation\.problems = 64, was 256"):
        _check_unchanged(store, HubConfig(evaluation=EvaluationConfig(problems=64)), "")
    store.close()


def test_a_setting_that_was_not_noted_down_at_first_is_fixed_from_then_on() -> None:
    store = Store.open("sqlite://")
    store.set_run_meta("fixed_settings", json.dumps({"run.seed": 0}))
    _check_unchanged(store, HubConfig(evaluation=EvaluationConfig(problems=64)), "")
    with pytest.raises(ConfigError, match=r"evaluation\.problems = 256, was 64"):
        _check_unchanged(store, HubConfig(), "")
    store.close()
