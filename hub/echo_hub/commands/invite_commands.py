"""`echo-hub invite`, `invites` and `uninvite`: manage personal invites. A running hub applies changes within
seconds."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echo_hub.actions.records import ActionOutcome
from echo_hub.actions.requests import MakeInvite, RevokeInvite
from echo_hub.commands.action_commands import noted
from echo_hub.config.file import load_config
from echo_hub.lifecycle.beside_hub import RunArgument, store_of, when
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError
from echo_shared.records.run import Invite

DAY_S = 86_400.0

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The invited person: up to 64 characters.")]


def invite(
    run_directory: RunArgument,
    name: NameArgument,
    keys: Annotated[
        int, typer.Option(min=1, max=10_000, help="Nodes that may join with it, each with its own key.")
    ] = 3,
    days: Annotated[
        float, typer.Option(min=0.01, max=3650, help="Days until new nodes can no longer join with it.")
    ] = 30.0,
) -> None:
    """Invite a person: print a token, once, that lets a few nodes join. Nodes that have joined may always reconnect."""
    from echo_hub.net.invitations import hash_of, new_token

    directory = RunDirectory(run_directory)
    if not 1 <= len(name) <= 64 or not name.isprintable() or name != name.strip():
        raise ConfigError(
            "This is not a valid name for an invite.", got=repr(name), do="Use 1 to 64 characters in one line."
        )
    token = new_token()
    with store_of(directory) as store:
        record = noted(store, MakeInvite(name=name, keys=keys, days=days), secret_hash=hash_of(token))
        if record.outcome is ActionOutcome.REFUSED:
            raise ConfigError(
                "An invite with this name exists already.",
                got=name,
                do=f"Use another name, or revoke that one first: echo-hub uninvite {run_directory} NAME",
            )
    typer.echo(
        f"Invited {name}: {_nodes(keys)} until {when(record.asked_at + days * DAY_S)}. The token is shown only now."
    )
    address = _address(directory)
    typer.echo(f"To lend a machine: echo-node join {address} --token {token}")
    typer.echo(f"Or send a link that shows how: {address}/about#invite={token}")


def invites(
    run_directory: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """List the invites: joined nodes, expiry, and which are revoked."""
    from echo_hub.store.invites import read_came_by, read_invites

    with store_of(RunDirectory(run_directory)) as store:
        made, came_by = store.read(read_invites), store.read(read_came_by)
    nodes_of: dict[int, list[str]] = {one.invite_id: [] for one in made}
    for node_id, invite_id in came_by.items():
        nodes_of.setdefault(invite_id, []).append(node_id)
    if as_json:
        typer.echo(json.dumps({"invites": [_figures(one, nodes_of[one.invite_id]) for one in made]}, indent=2))
        return
    table = Table("Name", "Nodes", "Expires", "Revoked", "Ids", box=None)
    for one in made:
        node_ids = nodes_of[one.invite_id]
        used = f"{len(node_ids)}/{one.max_keys}"
        table.add_row(Text(one.name), used, when(one.expires_at), when(one.revoked_at or 0.0), " ".join(node_ids))
    Console(width=1_000).print(table)  # Wide, because people copy ids from it and scripts read it.


def uninvite(
    run_directory: RunArgument,
    name: NameArgument,
    ban: Annotated[bool, typer.Option("--ban", help="Also ban all nodes that joined with it.")] = False,
) -> None:
    """Revoke a person's invite: no node can join with it any more. Connected nodes stay, unless they are banned."""
    from echo_hub.store.invites import read_came_by, read_invites

    with store_of(RunDirectory(run_directory)) as store:
        if all(known.name != name for known in store.read(read_invites)):
            raise ConfigError(
                "No invite has this name; nothing was changed.",
                got=name,
                do=f"List the names: echo-hub invites {run_directory}",
            )
        noted(store, RevokeInvite(name=name, ban=ban))
        of_name = {one.invite_id for one in store.read(read_invites) if one.name == name}
        node_ids = [node_id for node_id, invite_id in store.read(read_came_by).items() if invite_id in of_name]
    typer.echo(f"Revoked the invite for {name}, with which {_nodes(len(node_ids))} had joined.")
    if ban and node_ids:
        typer.echo(f"Banned: {', '.join(node_ids)}. To let one in again: echo-hub unban {run_directory} NODE")


def _figures(one: Invite, node_ids: list[str]) -> dict[str, object]:
    return {
        "name": one.name,
        "max_keys": one.max_keys,
        "created_at": one.created_at,
        "expires_at": one.expires_at,
        "revoked_at": one.revoked_at,
        "node_ids": node_ids,
    }


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _address(directory: RunDirectory) -> str:
    """Return the hub's URL according to the settings; "URL" if the system chooses the port at start."""
    from echo_hub.net.server import address

    server = load_config(directory.config, {}).server
    return address(server, server.port) if server.port or server.public_url else "URL"
