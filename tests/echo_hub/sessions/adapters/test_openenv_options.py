from __future__ import annotations

from pathlib import Path

import pytest

from echo_hub.sessions.adapters.openenv_options import OpenEnvOptions, ServerPlace
from echo_shared.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "reset_url"),
    [
        ("ws://127.0.0.1:8000/ws", "http://127.0.0.1:8000/reset"),
        ("wss://example.org/games/ws", "https://example.org/games/reset"),
        ("ws://[::1]:8000/ws", "http://[::1]:8000/reset"),
    ],
)
def test_an_address_names_a_server(name: str, reset_url: str) -> None:
    place = ServerPlace.of(name)
    assert (place.url, place.module, place.reset_url) == (name, "", reset_url)


def test_a_module_is_started() -> None:
    assert ServerPlace.of("server.app:app") == ServerPlace(module="server.app:app")


@pytest.mark.parametrize("name", ["", "server.app", "http://127.0.0.1:8000", "ws://", "ws://a b/ws", "a-b:app"])
def test_other_names_are_refused_with_both_forms(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ServerPlace.of(name)
    assert "openenv:ws://HOST:PORT/ws" in (raised.value.do or "")


def test_the_form_of_an_action_follows_from_its_field() -> None:
    assert OpenEnvOptions().action_form == "json"
    assert OpenEnvOptions(action="message").action_form == "field"
    assert OpenEnvOptions(form="tools").action_form == "tools"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"form": "field"}, 'is needed with form = "field" alone'),
        ({"form": "json", "action": "a"}, 'is needed with form = "field" alone'),
        ({"tools": [{"name": "a"}]}, "tools must be left out"),
        ({"form": "tools", "constants": {"a": 1}}, "constants must be left out"),
        ({"reward_bounds": [1, 0]}, "must be lower"),
        ({"turns": 0}, "greater than or equal to 1"),
        ({"acton": "a"}, "Extra inputs are not permitted"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        OpenEnvOptions.read("openenv:ws://127.0.0.1:8000/ws", options)
    assert said in (raised.value.got or "")


def test_a_directory_is_for_a_module_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert OpenEnvOptions.read("openenv:server.app:app", {}).directory == str(tmp_path)
    read = OpenEnvOptions.read("openenv:server.app:app", {"directory": "envs/a"})
    assert read.directory == str(tmp_path / "envs" / "a")
    assert OpenEnvOptions.read("openenv:server.app:app", read.model_dump()) == read
    with pytest.raises(ConfigError, match="directory"):
        OpenEnvOptions.read("openenv:ws://127.0.0.1:8000/ws", {"directory": "envs/a"})


def test_the_hub_knows_bounds_and_tools_without_the_server() -> None:
    tool = {"name": "guess", "description": "Guess.", "parameters": {"type": "object", "properties": {}}}
    given = {"form": "tools", "tools": [tool], "reward_bounds": [-1, 2]}
    found = OpenEnvOptions.read("openenv:ws://127.0.0.1:1/ws", given).declared
    assert found["reward_bounds"] == (-1.0, 2.0)
    assert found["reward_if_lost"] == -1.0
    assert found["component_bounds"] == {"unclipped": (-1e6, 1e6)}
    assert found["tools"] == [{"type": "function", "function": tool}]


def test_a_reward_for_a_lost_episode_is_within_the_bounds() -> None:
    assert OpenEnvOptions(reward_if_lost=0.5).declared["reward_if_lost"] == 0.5
    with pytest.raises(ConfigError, match="not valid"):
        OpenEnvOptions.read("openenv:a:b", {"reward_if_lost": 2})


def test_a_key_is_named_but_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    options = OpenEnvOptions.read("openenv:wss://example.org/ws", {"authorization_env": "GAME_KEY"})
    for value in ("", "Bearer a\nb"):
        monkeypatch.setenv("GAME_KEY", value)
        with pytest.raises(ConfigError, match="not in the environment"):
            _ = options.headers
    monkeypatch.setenv("GAME_KEY", "Bearer secret")
    assert options.headers == {"Authorization": "Bearer secret"} and options.variables == ["GAME_KEY"]
    assert "secret" not in repr(options)
    with pytest.raises(ConfigError, match="for a server at an address"):
        OpenEnvOptions.read("openenv:server.app:app", {"authorization_env": "GAME_KEY"})
