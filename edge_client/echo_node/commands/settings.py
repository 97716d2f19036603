"""The node's settings, read and changed; a node that runs takes them at once where it can."""

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
from echo_node.host.paths import Paths
from echo_node.settings_file import Setting, SettingsFile
from echo_shared.errors import ConnectError

app = typer.Typer(help="The node's settings.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(help="A setting's name, its table's before it: width, manners.idle_after_s.")]


@app.command("list")
def config_list(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Print every setting: what it is, where that was set, what it means and may be."""
    found = _file(Paths.find(data_dir)).all()
    if as_json:
        typer.echo(json.dumps([asdict(setting) for setting in found], indent=2))
        return
    for setting in found:
        where = "" if setting.where == "default" else f"   ({setting.where}; default: {_shown(setting.default)})"
        typer.echo(f"{setting.key} = {_shown(setting.value)}{where}")
        typer.echo(f"    {' '.join(setting.meaning.split())} Allowed: {setting.allowed}.")


@app.command("get")
def config_get(key: Key, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Print what a setting is."""
    setting = _file(Paths.find(data_dir)).one(key)
    typer.echo(json.dumps(asdict(setting), indent=2) if as_json else _shown(setting.value))


@app.command("set")
def config_set(
    key: Key,
    values: Annotated[list[str], typer.Argument(help="Its value; several for a list, [] for an empty one.")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Change a setting in config.toml, and in the node that runs."""
    paths = Paths.find(data_dir)
    file = _file(paths)
    file.set(key, values)
    _tell(paths, file, file.one(key), as_json=as_json)


@app.command("unset")
def config_unset(key: Key, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Take a setting out of config.toml: its default holds again."""
    paths = Paths.find(data_dir)
    file = _file(paths)
    file.unset(key)
    _tell(paths, file, file.one(key), as_json=as_json)


@app.command("path")
def config_path(as_json: Json = False) -> None:
    """Print where the settings file is, or would be."""
    path = Paths.find(None).config_file
    typer.echo(json.dumps({"path": str(path), "exists": path.exists()}) if as_json else str(path))


def _file(paths: Paths) -> SettingsFile:
    record = Hubs(paths).last()
    return SettingsFile(paths.config_file, {} if record is None else record.flags)


def _tell(paths: Paths, file: SettingsFile, setting: Setting, *, as_json: bool) -> None:
    """Has the running node read its settings again, and says what holds now."""
    try:
        answer: dict[str, Any] | None = asyncio.run(control.ask(paths.control_file, "reload"))
    except ConnectError:
        answer = None
    if as_json:
        typer.echo(json.dumps({"file": str(file.path), **asdict(setting), "node": answer}, indent=2))
        return
    typer.echo(f"{setting.key} = {_shown(setting.value)}, in {file.path}")
    if setting.where != "default" and not setting.where.startswith(str(file.path)):
        typer.echo(f"{_source(setting.where)} wins over the file.")
    for sentence in _said(answer, file):
        typer.echo(sentence)


def _source(where: str) -> str:
    return "What `echo-node join` was told on its command line" if where == "join" else f"The variable {where}"


def _said(answer: Mapping[str, Any] | None, file: SettingsFile) -> list[str]:
    if answer is None:
        return ["No node is running here: it holds from the next start on."]
    if answer["file"] != str(file.path):
        return [f"The node that runs reads another file: {answer['file']}"]
    said = []
    if now := [*answer["watch"], *answer["introduction"]]:
        said.append(f"The node works by it from now on: {', '.join(now)}.")
    if answer["engine"]:
        said.append(
            f"The node starts its engine again with it, and goes on with its work: {', '.join(answer['engine'])}."
        )
    if answer["restart"]:
        said.append(f"Only a node that is started again works by it: {', '.join(answer['restart'])}.")
    return said or ["Nothing changes for the node that runs."]


def _shown(value: Any) -> str:
    """As TOML has it, but for text, which needs no quotes here."""
    return value if isinstance(value, str) and value else json.dumps(value)
