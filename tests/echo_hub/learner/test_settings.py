from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from echo_hub.config.sections import HubConfig, ModelConfig
from echo_hub.config.serving_sections import DisseminationConfig
from echo_hub.learner.settings import LearnerSettings


def test_settings_travel_as_json(settings: LearnerSettings) -> None:
    assert LearnerSettings.model_validate(settings.model_dump(mode="json")) == settings


def test_an_unknown_setting_is_refused(settings: LearnerSettings) -> None:
    with pytest.raises(ValidationError, match="extra"):
        LearnerSettings.model_validate({**settings.model_dump(), "top_p": 0.9})


@pytest.mark.parametrize("name", ["builtin:tiny", "someone/some-model"])
def test_a_run_names_its_base(name: str) -> None:
    settings = LearnerSettings.of_run(HubConfig(model=ModelConfig(base=name)), base_dir=Path("x"), stop_ids=(1,))
    assert settings.base_name == name


def test_settings_name_the_precision_of_published_adapters() -> None:
    config = HubConfig(dissemination=DisseminationConfig(precision="bfloat16"))
    assert LearnerSettings.of_run(config, base_dir=Path("x"), stop_ids=(1,)).publish_precision == "bfloat16"


def test_a_base_given_by_path_is_named_without_its_path(tmp_path: Path) -> None:
    config = HubConfig(model=ModelConfig(base=str(tmp_path)))
    assert LearnerSettings.of_run(config, base_dir=tmp_path, stop_ids=(1,)).base_name == tmp_path.name


def test_settings_say_if_a_task_has_several_turns() -> None:
    made = [
        LearnerSettings.of_run(HubConfig(), base_dir=Path("x"), stop_ids=(1,), multi_turn=several)
        for several in (False, True)
    ]
    assert [one.multi_turn for one in made] == [False, True]
