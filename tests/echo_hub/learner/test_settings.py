from __future__ import annotations

import pytest
from pydantic import ValidationError

from echo_hub.learner.settings import LearnerSettings


def test_settings_travel_as_json(settings: LearnerSettings) -> None:
    assert LearnerSettings.model_validate(settings.model_dump(mode="json")) == settings


def test_an_unknown_setting_is_refused(settings: LearnerSettings) -> None:
    with pytest.raises(ValidationError, match="extra"):
        LearnerSettings.model_validate({**settings.model_dump(), "top_p": 0.9})
