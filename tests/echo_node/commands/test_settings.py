"""`echo-node config` while no node runs; with a running node, see tests/echo_node/test_daemon_reloads.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from echo_node.config import NodeConfig
from echo_node.host.hubs import HubRecord, Hubs
from echo_node.host.paths import NodePaths
from echo_node.main import app
from echo_node.settings_file import keys_of
from echo_shared.errors import ConfigError


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ECHO_NODE_HOME", str(tmp_path))
    return tmp_path / "config.toml"


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["config", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_setting_is_set_read_and_unset(file: Path) -> None:
    assert invoke("path") == f"{file}\n"
    assert json.loads(invoke("path", "--json")) == {"path": str(file), "exists": False}
    said = invoke("set", "manners.exclusive", "blender", "obs studio")
    assert said.splitlines() == [
        f'manners.exclusive = ["blender", "obs studio"], in {file}',
        "No node is running here: the setting applies from the next start.",
    ]
    assert invoke("get", "manners.exclusive") == '["blender", "obs studio"]\n'
    answer: dict[str, Any] = json.loads(invoke("set", "width", "4", "--json"))
    assert (answer["key"], answer["value"], answer["node"], answer["file"]) == ("width", 4, None, str(file))
    assert json.loads(invoke("get", "width", "--json"))["where"] == f"{file}, line 1"
    assert invoke("unset", "width").startswith("width = 0, in ")
    assert invoke("get", "width") == "0\n"
    with pytest.raises(ConfigError) as caught:
        invoke("get", "widht")
    assert "Did you mean width?" in str(caught.value)


def test_the_list_has_every_setting_with_its_meaning(file: Path) -> None:
    invoke("set", "width", "4")
    shown = invoke("list")
    for key in keys_of():
        assert f"\n{key} = " in f"\n{shown}"
    assert f"width = 4   ({file}, line 1; default: 0)\n    {NodeConfig.descriptions()['width']}" in shown
    listed = json.loads(invoke("list", "--json"))
    assert [setting["key"] for setting in listed] == list(keys_of())
    assert listed[0] == {
        "key": "name",
        "value": "",
        "default": "",
        "where": "default",
        "meaning": NodeConfig.descriptions()["name"],
        "allowed": "text, at most 64 characters",
    }


def test_an_environment_variable_that_overrides_the_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    record = HubRecord(url="http://127.0.0.1:1", hub_key_hex="ab" * 32, joined_at=1.0, flags={"width": 9})
    Hubs(NodePaths.find(None)).save(record)
    said = invoke("set", "width", "4")
    assert said.startswith("width = 9, ")
    assert "The command line of `echo-node join` overrides the file." in said
    monkeypatch.setenv("ECHO_NODE_THREADS", "3")
    assert "The variable ECHO_NODE_THREADS overrides the file." in invoke("set", "threads", "2")
