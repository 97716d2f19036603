from pathlib import Path

import pytest

from echo_hub.config.file import load_config
from echo_hub.sessions.kinds import SessionPlace, make_any_task
from echo_hub.tasks.names import FORMS, check_name, nearest_name
from echo_shared.errors import ConfigError


@pytest.mark.parametrize(
    "name",
    ["arithmetic", "jsonl", "environment:guess", "reasoning-gym:chain_sum", "python:my.module:make"],
)
def test_an_existing_task_is_found(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("aritmetic", "arithmetic"),
        ("Arithmetic", "arithmetic"),
        (" arithmetic ", "arithmetic"),
        ("json", "jsonl"),
        ("environment:gess", "environment:guess"),
        ("reasoning_gym:chain_sum", "reasoning-gym:chain_sum"),
        ("Python:my.module:make", "python:my.module:make"),
    ],
)
def test_the_nearest_name_is_named(name: str, nearest: str) -> None:
    assert nearest_name(name) == nearest
    with pytest.raises(ValueError, match=f"did you mean {nearest}?"):
        check_name(name)


@pytest.mark.parametrize(
    "name",
    ["", ":", "knights", "python", "python:module", "reasoning-gym:", "reasoning-gym:A B", "x" * 10_000, "jsonl\n"],
)
def test_an_unknown_name_lists_all_names(name: str) -> None:
    with pytest.raises(ValueError, match="there is no such task") as caught:
        check_name(name)
    assert all(form in str(caught.value) for form in FORMS)


def test_a_misspelt_task_in_the_settings_is_answered_with_tasks(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[task]\nname = 'aritmetic'\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.toml", {})
    got = caught.value.got or ""
    assert (
        f"{tmp_path / 'config.toml'}, line 2: task.name = 'aritmetic': there is no such task; did you mean arith" in got
    )
    assert "pattern" not in got and "^" not in got and all(form in got for form in FORMS)


def test_the_registry_makes_every_listed_form() -> None:
    for form in FORMS:
        try:
            make_any_task(form, {}, SessionPlace())
        except ConfigError as error:
            assert "no such task" not in error.what
