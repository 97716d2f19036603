"""Commands that read and change the node's settings. A running node applies changes at once, if it can."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from echo_node.commands.options import DataDir, Json
from echo_node.host import control
from echo_node.host.hubs import Hubs
from echo_node.host.paths import NodePaths
from echo_node.settings_file import SettingsFile, SettingValue
from echo_shared.errors import ConnectError

app = typer.Typer(help="The node's settings.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(help="A setting's name, after its table's name: width, manners.idle_after_s.")]


@app.command("list")
def config_list(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Print every setting: its value, its source, its meaning and its allowed values."""
    found = _file(NodePaths.find(data_dir)).all()
    if as_json:
        typer.echo(json.dumps([asdict(setting) for setting in found], indent=2))
        return
    for setting in found:
        where = "" if setting.where == "default" else f"   ({setting.where}; default: {_shown(setting.default)})"
        typer.echo(f"{setting.key} = {_shown(setting.value)}{where}")
        typer.echo(f"    {' '.join(setting.meaning.split())} Allowed: {setting.allowed}.")


@app.command("get")
def config_get(key: Key, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Print a setting's value."""
    setting = _file(NodePaths.find(data_dir)).one(key)
    typer.echo(json.dumps(asdict(setting), indent=2) if as_json else _shown(setting.value))


@app.command("set")
def config_set(
    key: Key,
    values: Annotated[list[str], typer.Argument(help="The value; several for a list, [] for an empty one.")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Change a setting in config.toml, and in the running node."""
    paths = NodePaths.find(data_dir)
    file = _file(paths)
    file.set(key, values)
    _reload_and_report(paths, file, file.one(key), as_json=as_json)


@app.command("unset")
def config_unset(key: Key, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Remove a setting from config.toml, which restores its default."""
    paths = NodePaths.find(data_dir)
    file = _file(paths)
    file.unset(key)
    _reload_and_report(paths, file, file.one(key), as_json=as_json)


@app.command("path")
def config_path(as_json: Json = False) -> None:
    """Print the settings file's path, even if it does not exist."""
    path = NodePaths.find(None).config_file
    typer.echo(json.dumps({"path": str(path), "exists": path.exists()}) if as_json else str(path))


def _file(paths: NodePaths) -> SettingsFile:
    record = Hubs(paths).last()
    return SettingsFile(paths.config_file, {} if record is None else record.flags)


def _reload_and_report(paths: NodePaths, file: SettingsFile, setting: SettingValue, *, as_json: bool) -> None:
    """Make the running node load its settings again, and print the result."""
    try:
        answer: dict[str, Any] | None = asyncio.run(control.ask(paths.control_file, "reload"))
    except ConnectError:
        answer = None
    if as_json:
        typer.echo(json.dumps({"file": str(file.path), **asdict(setting), "node": answer}, indent=2))
        return
    typer.echo(f"{setting.key} = {_shown(setting.value)}, in {file.path}")
    if setting.where != "default" and not setting.where.startswith(str(file.path)):
        typer.echo(f"{_source(setting.where)} overrides the file.")
    for sentence in _reload_lines(answer, file):
        typer.echo(sentence)


def _source(where: str) -> str:
    return "The command line of `echo-node join`" if where == "join" else f"The variable {where}"


def _reload_lines(answer: Mapping[str, Any] | None, file: SettingsFile) -> list[str]:
    if answer is None:
        return ["No node is running here: the setting applies from the next start."]
    if answer["file"] != str(file.path):
        return [f"The running node uses another file: {answer['file']}"]
    said = []
    if now := [*answer["watch"], *answer["introduction"]]:
        said.append(f"The node now uses: {', '.join(now)}.")
    if answer["engine"]:
        said.append(f"The node restarts its engine to use: {', '.join(answer['engine'])}.")
    if answer["restart"]:
        said.append(f"The node uses after its next start: {', '.join(answer['restart'])}.")
    return said or ["Nothing changes for the running node."]


def _shown(value: Any) -> str:
    """Format a value as in TOML, but texts without quotes."""
    return value if isinstance(value, str) and value else json.dumps(value)
