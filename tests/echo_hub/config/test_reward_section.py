from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from echo_hub.config.reward_section import RewardConfig

LLM = {"kind": "llm", "url": "http://localhost:8000/v1", "model": "m"}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"format": "("}, "not a valid regular expression"),
        ({"weights": {"format": 1.0}}, "reward.format must be"),
        ({"weights": {"length": 1.0}}, "length_most"),
        ({"weights": {"tagged": 1.0}}, "reward.tagged must be"),
        ({"weights": {"score": float("nan")}}, "finite"),
        ({"weights": {"a b": 1.0}}, "match pattern"),
        ({"length_zero": 5}, "reward.length_most must be above 0"),
        ({"length_most": 5, "length_zero": 5}, "more than reward.length_most"),
        ({"length_most": 5, "length_least": 6}, "at most reward.length_most"),
        ({"tagged": "a>"}, "match pattern"),
        ({"judges": {"score": LLM}}, "that is another component"),
        ({"judges": {"a b": LLM}}, "match pattern"),
    ],
)
def test_inconsistent_settings_are_refused_with_a_fix(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RewardConfig.model_validate(settings)


def test_the_names_list_the_enabled_components() -> None:
    assert RewardConfig().names == ()
    assert RewardConfig(format="x", length_least=3).names == ("format", "length")
