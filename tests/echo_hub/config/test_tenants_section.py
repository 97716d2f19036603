from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from echo_hub.config.file import load_config, render_config
from echo_hub.config.sections import HubConfig
from echo_hub.config.tenants_section import TenantsConfig, TinkerConfig
from echo_shared.errors import ConfigError


def test_both_interfaces_are_off_by_default() -> None:
    assert not HubConfig().serves_tenants
    assert HubConfig.model_validate({"tinker": {"enabled": True}}).serves_tenants
    assert HubConfig.model_validate({"openai": {"enabled": True}}).serves_tenants


def test_aliases_of_the_base_survive_the_runs_file(tmp_path: Path) -> None:
    aliases = {"Qwen/Qwen3-8B": "base", "meta-llama/Llama-3.2-1B": "base"}
    config = HubConfig.model_validate({"tinker": {"enabled": True, "aliases": aliases}})
    (tmp_path / "config.toml").write_text(render_config(config), encoding="utf-8")
    assert load_config(tmp_path / "config.toml", {}).tinker.aliases == aliases


@pytest.mark.parametrize("name", ["", "builtin:tiny", "a b", "/x", "../x", "x" * 129, "é"])
def test_names_that_clients_cannot_use_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        TinkerConfig.model_validate({"aliases": {name: "base"}})


@pytest.mark.parametrize(
    "settings",
    [
        {"drawn_by": "strangers"},
        {"device": "tpu"},
        {"tokens_per_day": -1},
        {"max_queued": 0},
        {"max_models": 0},
        {"max_rank": 0},
        {"max_rank": 1025},
        {"max_checkpoint_bytes": -1},
        {"session_expires_s": 59},
        {"checkpoint_every": 0},
    ],
)
def test_impossible_limits_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TenantsConfig.model_validate(settings)


def test_an_alias_stands_only_for_the_runs_base() -> None:
    with pytest.raises(ValidationError):
        TinkerConfig.model_validate({"aliases": {"Qwen/Qwen3-8B": "Qwen/Qwen3-0.6B"}})


NONE = {"task": {"name": "none"}}


def test_a_run_without_a_task_works_for_tenants() -> None:
    config = HubConfig.model_validate({**NONE, "openai": {"enabled": True}})
    assert not config.trains and config.needs_nodes
    assert config.task.members == {} and config.evaluation_sets == ()
    with pytest.raises(ConfigError, match="no task of its own"):
        config.check_trains()
    by_hub = HubConfig.model_validate({**NONE, "openai": {"enabled": True}, "tenants": {"drawn_by": "hub"}})
    assert not by_hub.needs_nodes
    HubConfig().check_trains()
    assert HubConfig().trains and HubConfig().needs_nodes


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (NONE, "the hub has no work"),
        ({**NONE, "tinker": {"enabled": True}, "run": {"mode": "sequential"}}, "async"),
        ({"task": {"name": "none", "options": {"digits": 2}}}, "task.options must be left out"),
        ({"task": {"mixture": {"a": {"name": "none"}}}}, "cannot be none"),
        ({"tinker": {"enabled": True}, "run": {"mode": "colocated"}}, "there are no nodes"),
    ],
)
def test_settings_that_leave_no_work_are_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        HubConfig.model_validate(sections)
