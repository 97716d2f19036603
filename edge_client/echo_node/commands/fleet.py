"""The fleet: an owner's machines, shown and paused from any of these machines through a hub."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from echo_node.commands.options import DataDir, Json, joined_hub, last_hub
from echo_node.host import control
from echo_node.host.address import HubAddress
from echo_node.host.hubs import HubRecord
from echo_node.host.paths import NodePaths
from echo_node.host.pause import seconds_of
from echo_node.net.books import HubBooks
from echo_shared.errors import ConfigError, ConnectError, RemoteProtocolError
from echo_shared.files.atomic import write_private
from echo_shared.signing import key_file
from echo_shared.signing.identity import Identity, node_id
from echo_shared.signing.owner import code_of, owner_of
from echo_shared.wire.messages import Fleet, FleetNode
from echo_shared.wire.owner_commands import MOST_NAMED, NodeReport, OwnerCommand, id_of, read_report, sign_command

app = typer.Typer(help="All machines of one owner: show, pause and resume them from any of them.")

Hub = Annotated[str | None, typer.Option("--hub", help="Through this joined hub; default: the last joined one.")]
NodesArgument = Annotated[list[str] | None, typer.Argument(metavar="[NODE]...", help="Names; default: all nodes.")]
Length = Annotated[str | None, typer.Option("--for", help="30m, 2h, 1h30m, 3d; default: until `fleet resume`.")]


@app.callback(invoke_without_command=True)
def fleet_show(context: typer.Context, data_dir: DataDir = None, hub: Hub = None, as_json: Json = False) -> None:
    """All machines of one owner: show, pause and resume them from any of them. Without a command: show them."""
    if context.invoked_subcommand is None:
        line = OwnerLine.find(data_dir, hub)
        _print(line.tell("status", to=()), line, as_json=as_json)


@app.command("new")
def fleet_new(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Begin a fleet with this machine. Print the code for further machines."""
    paths = NodePaths.find(data_dir)
    if paths.owner_key.exists():
        raise ConfigError(
            "This machine is in a fleet already.",
            got=str(paths.owner_key),
            do="Print its code with: echo-node fleet code. To leave it: echo-node fleet leave",
        )
    _keep(paths, Identity.generate())
    _print_code(paths, as_json=as_json)


@app.command("code")
def fleet_code(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Print the code with which another machine joins this fleet."""
    _print_code(NodePaths.find(data_dir), as_json=as_json)


@app.command("join")
def fleet_join(
    code: Annotated[str | None, typer.Argument(help="Code of the fleet; default: ask for it.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Join the fleet of another of your machines, by its code."""
    paths = NodePaths.find(data_dir)
    owner = owner_of(typer.prompt("Code, from `echo-node fleet code`", hide_input=True) if code is None else code)
    if paths.owner_key.exists() and key_file.load(paths.owner_key).public_key != owner.public_key:
        raise ConfigError("This machine is in another fleet.", do="Leave it first: echo-node fleet leave")
    _keep(paths, owner)
    said = {"joined": True, "owner": owner.node_id}
    typer.echo(json.dumps(said) if as_json else "Joined. See all of its machines with: echo-node fleet")


@app.command("leave")
def fleet_leave(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Leave the fleet. The other machines no longer see this one, and cannot pause it."""
    paths = NodePaths.find(data_dir)
    _owner(paths)
    paths.owner_key.unlink()
    _tell_node(paths)
    typer.echo(json.dumps({"joined": False}) if as_json else "This machine is in no fleet now.")


@app.command("pause")
def fleet_pause(
    nodes: NodesArgument = None,
    length: Length = None,
    data_dir: DataDir = None,
    hub: Hub = None,
    as_json: Json = False,
) -> None:
    """Pause the fleet's machines, or only those that you name. Their unfinished work goes back to the hub."""
    pause_s = None if length is None else seconds_of(length)
    line = OwnerLine.find(data_dir, hub)
    _print(line.tell("pause", to=nodes or (), pause_s=pause_s), line, as_json=as_json)


@app.command("resume")
def fleet_resume(nodes: NodesArgument = None, data_dir: DataDir = None, hub: Hub = None, as_json: Json = False) -> None:
    """End the pause of all machines of the fleet, or of named machines."""
    line = OwnerLine.find(data_dir, hub)
    _print(line.tell("resume", to=nodes or ()), line, as_json=as_json)


@app.command("count")
def fleet_count(
    how: Annotated[str, typer.Argument(metavar="once|apart", help="One entry for all machines, or one for each.")],
    data_dir: DataDir = None,
    hub: Hub = None,
    as_json: Json = False,
) -> None:
    """Choose how the hub's leaderboard counts the fleet's machines."""
    if how not in ("once", "apart"):
        raise ConfigError("This is not a way to count.", got=repr(how), do="Give `once` or `apart`.")
    line = OwnerLine.find(data_dir, hub)
    fleet = line.books.fleet(line.owner, counts_once=how == "once")
    if as_json:
        typer.echo(json.dumps({"hub": line.hub.url, "counts_once": fleet.counts_once}))
    elif fleet.counts_once:
        typer.echo("The leaderboard shows these machines as one entry.")
    else:
        typer.echo("The leaderboard shows each machine apart.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAnswer:
    """The hub's answer to a command for several nodes. `fleet` has each node's report; a report belongs to this command
    if it names `command_id`. `to`: ids of the nodes that the command was for; empty = all.
    """

    fleet: Fleet
    command_id: bytes
    to: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerLine:
    """Sends the owner's commands to the other machines, through one hub."""

    me: Identity
    owner: Identity
    hub: HubRecord

    @classmethod
    def find(cls, data_dir: Path | None, hub: str | None) -> OwnerLine:
        """Return the connection to the hub at the address `hub`, or to the last joined hub. Raises ConfigError if this
        machine belongs to no fleet, or has not joined this hub.
        """
        paths = NodePaths.find(data_dir)
        owner = _owner(paths)
        record = last_hub(paths) if hub is None else joined_hub(paths, hub)
        return cls(me=key_file.load_or_create(paths.identity_key), owner=owner, hub=record)

    @property
    def books(self) -> HubBooks:
        return HubBooks(
            HubAddress(origin=self.hub.url),
            me=self.me,
            hub_key=self.hub.hub_key,
            invite_token=self.hub.invite_token,
        )

    def tell(
        self, verb: Literal["status", "pause", "resume"], *, to: Sequence[str], pause_s: float | None = None
    ) -> FleetAnswer:
        """Send a command to the nodes with these names (empty = all), and return the nodes with their reports. Raises
        ConfigError for an unknown name.
        """
        ids = _ids_of(to, self.tell("status", to=())) if to else ()
        command = OwnerCommand(
            verb=verb,
            pause_s=pause_s,
            hub_key=self.hub.hub_key.hex(),
            to=ids,
            sender=self.me.node_id,
            sent_at=time.time(),
        )
        said = sign_command(command, self.owner)
        fleet = self.books.fleet(self.owner, command=said, to=ids)
        return FleetAnswer(fleet=fleet, command_id=id_of(said), to=ids)


def _ids_of(names: Sequence[str], answer: FleetAnswer) -> tuple[str, ...]:
    """Return the ids of answering nodes. `names` must contain the node's name, or the start of its id. Names in the
    hub's list are ignored: only the nodes' answers are signed. Raises ConfigError.
    """
    if len(names) > MOST_NAMED:
        raise ConfigError(
            "Too many machines are named.", got=f"{len(names)}", do=f"Name {MOST_NAMED}, or none for all."
        )
    name_of = {
        node_id(node.node_key): report.name
        for node in answer.fleet.nodes
        if (report := _read(node, answer.command_id)) is not None
    }
    found: dict[str, str] = {}
    for name in names:
        of_name = {of for of, shown in name_of.items() if shown == name}
        fitting = of_name or {of for of in name_of if of.startswith(name)}
        if len(fitting) != 1:
            known = ", ".join(sorted(f"{shown} ({of[:10]})" for of, shown in name_of.items()))
            raise ConfigError(
                "No connected machine has this name." if not fitting else "Several machines have this name.",
                got=repr(name),
                do=f"Name one of these, or the start of its id: {known or 'none is connected'}",
            )
        found[name] = fitting.pop()
    return tuple(found.values())


def _read(node: FleetNode, command_id: bytes) -> NodeReport | None:
    """Return the node's report; None without a report, or if the node's signature is wrong."""
    with suppress(RemoteProtocolError):
        return None if node.report is None else read_report(node.report, command_id, node.node_key)
    return None


def _print(answer: FleetAnswer, line: OwnerLine, *, as_json: bool) -> None:
    rows = [_row(node, answer.command_id, line.me) for node in answer.fleet.nodes]
    rows = [row for row in rows if not answer.to or row["node_id"] in answer.to]
    if as_json:
        said = {"hub": line.hub.url, "counts_once": answer.fleet.counts_once, "nodes": rows}
        typer.echo(json.dumps(said, indent=2))
        return
    if not rows:
        typer.echo("No machine of this fleet has joined this hub yet. A node joins with: echo-node join URL")
    for row in rows:
        speed = "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.0f} tokens/s"
        here = " (here)" if row["is_here"] else ""
        typer.echo(f"{row['name'] + here:<24} {row['state']:<14} {speed:>14}  {row['rollouts']:>9,} rollouts")
        if text := row["problem"] or row["reason"]:
            typer.echo(f"    {text}")
    if (hidden := answer.fleet.num_nodes - len(answer.fleet.nodes)) > 0:
        typer.echo(f"{hidden} more machines were last seen before these. Commands without names reach them, too.")


def _row(node: FleetNode, command_id: bytes, me: Identity) -> dict[str, Any]:
    named = node_id(node.node_key)
    report, problem = NodeReport(state="not connected"), ""
    if node.report is not None:
        try:
            report = read_report(node.report, command_id, node.node_key)
        except RemoteProtocolError as error:
            report, problem = NodeReport(state="unknown"), str(error)
    elif node.is_connected:
        report = NodeReport(state="connected", reason="It did not answer. Its Echo may be older than this one.")
    else:
        ago = timedelta(seconds=round(max(0.0, time.time() - node.last_seen)))
        report = NodeReport(state="not connected", reason=f"Last seen {ago} ago. It did not get the command.")
    return {
        "name": node.name,
        "node_id": named,
        "is_here": named == me.node_id,
        "is_connected": node.is_connected,
        "rollouts": node.rollouts,
        "tokens": node.tokens,
        **report.model_dump(exclude={"name"}),
        "problem": problem or report.problem,
    }


def _owner(paths: NodePaths) -> Identity:
    if not paths.owner_key.exists():
        raise ConfigError(
            "This machine is in no fleet.",
            got=f"no {paths.owner_key}",
            do="Begin one with: echo-node fleet new, or join that of another machine: echo-node fleet join",
        )
    return key_file.load(paths.owner_key)


def _keep(paths: NodePaths, owner: Identity) -> None:
    paths.data_dir.mkdir(parents=True, exist_ok=True)
    write_private(paths.owner_key, owner.to_pem())
    _tell_node(paths)


def _tell_node(paths: NodePaths) -> None:
    """Let a running node use the changed key. A node that does not run reads the key at its start."""
    with suppress(ConnectError):
        asyncio.run(control.ask(paths.control_file, "owner"))


def _print_code(paths: NodePaths, *, as_json: bool) -> None:
    code = code_of(_owner(paths))
    if as_json:
        typer.echo(json.dumps({"code": code}))
        return
    typer.echo(f"{code}\n")
    typer.echo("On each of your other machines: echo-node fleet join")
    typer.echo("Keep the code secret: its holder can show and pause your machines, and nothing else.")
