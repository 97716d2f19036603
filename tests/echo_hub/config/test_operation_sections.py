from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from echo_hub.config.operation_sections import AlertKind, AlertsConfig, LogConfig
from echo_hub.operation.problems import ProblemKind
from echo_shared.settings import secrets_of


def test_by_default_nobody_is_told_and_everything_would_be() -> None:
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
def test_what_does_not_fit_together_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        AlertsConfig.model_validate(settings)


def test_secrets_are_known_as_such() -> None:
    settings = AlertsConfig.model_validate(
        {
            "webhook_url": "https://x.example/secret",
            "webhook_secret": "s" * 16,
        }
    )
    assert sorted(secrets_of(settings)) == sorted(["https://x.example/secret", "s" * 16])


def test_a_log_has_a_cap() -> None:
    for wrong in ({"max_bytes": 0}, {"kept": 0}, {"level": "loud"}):
        with pytest.raises(ValidationError):
            LogConfig.model_validate(wrong)
