"""Commands for the node's team on its hub, signed with the node's key."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer

from echo_node.commands.options import DataDir, Json, last_hub
from echo_node.host.address import HubAddress
from echo_node.host.paths import NodePaths
from echo_node.net.books import HubBooks
from echo_shared.errors import ConfigError
from echo_shared.signing import key_file
from echo_shared.wire.messages import MAX_TEAM_NAME, Team
from echo_shared.wire.messages.fields import printable_line
from echo_shared.wire.messages.shown_names import fault_of

app = typer.Typer(help="The node's team on the last joined hub.", no_args_is_help=True)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help=f"The team's name, up to {MAX_TEAM_NAME} characters.")
]


@app.command("create")
def team_create(name: NameArgument, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Make a team, and join it. The hub must have counted work of this node before."""
    _print("create", _new(name), NodePaths.find(data_dir), as_json=as_json)


@app.command("join")
def team_join(name: NameArgument, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Join a team, and leave the previous team. The node's work counts for the team from now on."""
    _print("join", _checked(name), NodePaths.find(data_dir), as_json=as_json)


@app.command("leave")
def team_leave(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Leave the team. The node's work during its membership stays counted for the team."""
    _print("leave", "", NodePaths.find(data_dir), as_json=as_json)


@app.command("show")
def team_show(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Print the standing of the node's team."""
    _print("show", "", NodePaths.find(data_dir), as_json=as_json)


def _new(name: str) -> str:
    if fault := fault_of(_checked(name)):
        raise ConfigError("This is not a valid team name.", got=repr(name), do=f"Give another: {fault}.")
    return name


def _checked(name: str) -> str:
    if not 1 <= len(name) <= MAX_TEAM_NAME or printable_line(name) != name:
        raise ConfigError(
            "This is not a valid team name.", got=repr(name), do=f"Give one line of at most {MAX_TEAM_NAME} characters."
        )
    return name


def _print(action: Literal["create", "join", "leave", "show"], name: str, paths: NodePaths, *, as_json: bool) -> None:
    record = last_hub(paths)
    books = HubBooks(
        HubAddress(origin=record.url),
        me=key_file.load_or_create(paths.identity_key),
        hub_key=record.hub_key,
        invite_token=record.invite_token,
    )
    team = books.team(action, name)
    page = f"{record.url}{team.page}" if team.page else ""
    if as_json:
        typer.echo(json.dumps({"hub": record.url, **_fields(team), "page": page}, indent=2))
        return
    if not team.name:
        typer.echo(
            "The node is in no team. Join one, or make one: echo-node team join NAME, echo-node team create NAME"
        )
        return
    rank = f"#{team.rank} of {team.num_ranked}" if team.rank else "nothing has counted yet"
    typer.echo(f"team     {team.name}{', made by this node' if team.is_founder else ''}")
    typer.echo(f"nodes    {team.members}")
    typer.echo(f"counted  {team.rollouts} rollouts, {team.tokens} tokens: {rank}")
    typer.echo(f"recently {team.tokens_per_day:.0f} tokens a day")
    typer.echo(f"page     {page}")


def _fields(team: Team) -> dict[str, Any]:
    return {"team": team.name or None, **team.model_dump(exclude={"type", "name", "page"})}
