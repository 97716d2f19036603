from __future__ import annotations

import tomllib
from typing import Any

import pytest
from pydantic import ValidationError

from echo_hub.config.file import render_config
from echo_hub.config.judge_section import LlmJudgeConfig, RewardModelConfig
from echo_hub.config.sections import HubConfig

LLM = {"kind": "llm", "url": "http://localhost:8000/v1", "model": "m"}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({**LLM, "kind": "oracle"}, "'llm', 'reward_model'"),
        ({**LLM, "url": "localhost:8000"}, "match pattern"),
        ({**LLM, "url": "http://user:secret@localhost/v1"}, "match pattern"),
        ({**LLM, "prompt": "Rate it."}, "must contain {completion}"),
        ({**LLM, "lowest": 10}, "lowest must be less than highest"),
        ({**LLM, "api_key": "sk-1"}, "Extra inputs"),
        ({**LLM, "api_key_env": "sk-1"}, "match pattern"),
        ({"kind": "reward_model", "model": "m", "lowest": 1, "highest": 1}, "lowest must be less than highest"),
        ({"kind": "reward_model", "model": "m", "url": "http://localhost"}, "Extra inputs"),
    ],
)
def test_inconsistent_settings_are_refused_with_a_fix(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        HubConfig.model_validate({"reward": {"judges": {"style": settings}}})


def test_the_kind_chooses_the_settings_and_a_file_keeps_them() -> None:
    judges = {"style": LLM, "help": {"kind": "reward_model", "model": "m", "sigmoid": False}}
    config = HubConfig.model_validate({"reward": {"judges": judges, "weights": {"style": 0.5}}})
    assert isinstance(config.reward.judges["style"], LlmJudgeConfig)
    assert isinstance(config.reward.judges["help"], RewardModelConfig)
    assert config.reward.judges["style"].bounds == (0.0, 1.0)
    assert config.reward.judges["help"].bounds == (-10.0, 10.0)
    assert HubConfig.model_validate(tomllib.loads(render_config(config))).reward == config.reward
