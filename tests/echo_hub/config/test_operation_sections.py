from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from echo_hub.config.operation_sections import AlertKind, AlertsConfig
from echo_hub.operation.problems import ProblemKind
from echo_shared.settings import secrets_of


def test_by_default_no_receiver_is_set_and_all_events_would_be_sent() -> None:
    settings = AlertsConfig()
    assert list(secrets_of(settings)) == [] and settings.told_of == get_args(AlertKind)
    assert set(settings.told_of) == {*ProblemKind, "finished"}
    assert AlertsConfig(kinds=("disk",)).told_of == ("disk",)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"webhook_url": "ftp://x"}, "webhook_url"),
        ({"webhook_url": "https://x /y"}, "webhook_url"),
        ({"webhook_url": "https://x/y", "webhook_secret": "short"}, "webhook_secret"),
        ({"webhook_secret": "s" * 16}, "without webhook_url"),
        ({"kinds": ["disc"]}, "kinds"),
        ({"learner_idle_s": -1}, "learner_idle_s"),
    ],
)
def test_inconsistent_settings_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        AlertsConfig.model_validate(settings)


def test_secret_settings_are_marked() -> None:
    settings = AlertsConfig.model_validate(
        {
            "webhook_url": "https://x.example/secret",
            "webhook_secret": "s" * 16,
        }
    )
    assert sorted(secrets_of(settings)) == sorted(["https://x.example/secret", "s" * 16])
