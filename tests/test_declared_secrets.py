"""Every setting that holds a secret is declared as secret, and no program shows its value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from echo_hub.config.file import load_config, render_config
from echo_hub.config.sections import HubConfig
from echo_hub.lifecycle.comparing import differing
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.simulator.scenario import Scenario
from echo_node.config import NodeConfig
from echo_node.host.paths import HOME_VARIABLE
from echo_shared.errors import ConfigError
from echo_shared.settings import is_secret, says_secret, secrets_of, without_secrets

NO_SECRETS: Final = {
    ("LlmJudgeConfig", "api_key_env"): "the name of an environment variable",
    ("LlmJudgeConfig", "url"): "its pattern admits no password",
    ("ServerConfig", "tls_key"): "a path",
    ("GatewaysConfig", "tls_key"): "a path",
    ("ServerConfig", "public_url"): "told to everybody",
    ("GatewaysConfig", "hub_url"): "an origin",
}
SECRETS: Final[dict[str, dict[str, Any]]] = {
    "server": {"join": "invite", "invite_tokens": ["invite-token-one", "invite-token-two"]},
    "store": {"url": "postgresql://hub:store-password@database/echo"},
    "gateways": {"url": "nats://hub:broker-password@broker:4222"},
    "alerts": {
        "webhook_url": "https://hooks.example/webhook-address",
        "webhook_secret": "webhook-secret-of-ours",
    },
    "task": {"name": "arithmetic", "options": {}},
}
SAID: Final = (
    *("invite-token-one", "invite-token-two", "store-password", "broker-password"),
    *("webhook-address", "webhook-secret-of-ours"),
)


def fields(model: type[BaseModel], seen: set[type]) -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield all fields of a model, nested models included."""
    if model in seen:
        return
    seen.add(model)
    for name, field in model.model_fields.items():
        yield model.__name__, name, field
        for inner in models(field.annotation):
            yield from fields(inner, seen)


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models(part)


def holds_text(annotation: Any) -> bool:
    return annotation is str or any(holds_text(part) for part in get_args(annotation))


@pytest.mark.parametrize("settings", [HubConfig, NodeConfig, Scenario])
def test_settings_with_secret_names_are_declared_secret(settings: type[BaseModel]) -> None:
    undeclared = [
        f"{model}.{name}"
        for model, name, field in fields(settings, set())
        if (says_secret(name) or "url" in name.split("_")) and holds_text(field.annotation)
        if not is_secret(field) and (model, name) not in NO_SECRETS
    ]
    assert undeclared == [], "declare them with SECRET, or give the reason in NO_SECRETS"
    for model, name, field in fields(settings, set()):
        assert not is_secret(field) or not field.repr, f"{model}.{name} would appear in every repr of its settings"


def test_a_runs_settings_are_shown_without_secrets(tmp_path: Path) -> None:
    config = load_config(None, SECRETS)
    make_run(RunDirectory(tmp_path / "run"), config)
    assert load_config(tmp_path / "run" / "config.toml", {}) == config, "the run's own file has the secrets"
    assert sorted(secret for secret in SAID if secret in (tmp_path / "run" / "config.toml").read_text()) == sorted(SAID)
    for command in ("serve", "gateway"):
        program = [sys.executable, "-m", "echo_hub.main", command, str(tmp_path / "run"), "--dry-run"]
        shown = subprocess.run(program, capture_output=True, text=True, check=True).stdout
        assert not [secret for secret in SAID if secret in shown]
        assert 'webhook_secret = "**********"' in shown and 'invite_tokens = ["**********", "**********"]' in shown
        assert 'join = "invite"' in shown
    assert not [secret for secret in SAID if secret in repr(config)]
    assert set(SAID) <= {*secrets_of(config), "webhook-address"}, "logs hide all of these, and the password of a URL"


def test_differing_secrets_are_reported_without_their_values() -> None:
    found = differing([load_config(None, SECRETS), load_config(None, {})])
    assert found["alerts.webhook_secret"] == ("(set, but not shown)", "")
    assert not [secret for secret in SAID if secret in repr(found)]


@pytest.mark.parametrize(
    ("section", "wrong"),
    [
        ("alerts", {"webhook_secret": "too-short-secret"[:15]}),
        ("alerts", {"webhook_url": "ftp://hooks.example/secret-place"}),
        ("server", {"invite_tokens": ["secret"]}),
        ("server", {"invite_tokens": "secret-in-no-list"}),
        ("gateways", {"url": "http://hub:secret@broker"}),
    ],
)
def test_a_secret_that_is_not_valid_is_not_repeated(tmp_path: Path, section: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, {section: wrong})
    (key,) = wrong
    assert f"{section}.{key}" in str(refused.value) and "**********" in str(refused.value)
    assert "secret-" not in str(refused.value) and "'secret'" not in str(refused.value)


def test_options_of_a_task_that_name_a_secret_are_masked() -> None:
    options = {"api_key": "a-key-of-ours", "tokens": 5, "nested": {"password": "another"}, "level": "easy"}
    config = HubConfig.model_construct(**{**dict(load_config(None, {})), "task": load_config(None, {}).task})
    shown = without_secrets(config.model_copy(update={"task": config.task.model_copy(update={"options": options})}))
    assert shown.task.options == {
        "api_key": "**********",
        "tokens": 5,
        "nested": {"password": "**********"},
        "level": "easy",
    }
    assert "a-key-of-ours" not in render_config(shown)


def test_a_nodes_settings_are_shown_without_secrets(tmp_path: Path) -> None:
    code = "A" * 29
    (tmp_path / "config.toml").write_text(f'invite_token = "the-invitation"\nhelpers = ["127.0.0.1:7#{code}"]\n')

    def node(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "echo_node.main", "config", *arguments]
        return subprocess.run(program, capture_output=True, text=True, env={**os.environ, HOME_VARIABLE: str(tmp_path)})

    broken = node("list")
    assert broken.returncode != 0 and code not in broken.stderr + broken.stdout
    (tmp_path / "config.toml").write_text('invite_token = "the-invitation"\nhelpers = ["127.0.0.1:7"]\n')
    shown = [node("list").stdout, node("list", "--json").stdout, node("get", "invite_token").stdout]
    shown += [node("set", "invite_token", "the-invitation-two").stdout, node("get", "helpers", "--json").stdout]
    assert all("**********" in text and "the-invitation" not in text for text in shown), shown
    assert json.loads(shown[-1])["value"] == ["**********"]
    assert 'invite_token = "the-invitation-two"' in (tmp_path / "config.toml").read_text()
