"""`echo-hub nodes`, `ban`, `unban` and `pardon`: list a run's nodes, and decide which take part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echo_hub.actions.requests import Ban, Pardon, Unban
from echo_hub.commands.action_commands import noted
from echo_hub.lifecycle.beside_hub import RunArgument, store_of, when
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError

if TYPE_CHECKING:
    from echo_hub.store.store import Store
    from echo_shared.records.run import NodeTotals


NodesArgument = Annotated[list[str], typer.Argument(metavar="NODE...", help="Ids, as `echo-hub nodes` prints them.")]


def nodes(run_directory: RunArgument) -> None:
    """List all nodes that have ever joined, with the ids that `ban` and `pardon` take and with their trust standing."""
    from echo_hub.store.reports import read_leaderboard

    directory = RunDirectory(run_directory)
    titles = ("Id", "Name", "Engine", "Device", "Last seen", "Rollouts", "Standing", "Checked", "Banned", "Invite")
    table = Table(*titles, box=None)
    with store_of(directory) as store:
        for node in store.read(read_leaderboard):
            table.add_row(
                node.node_id,
                Text(node.name),
                Text(node.backend),
                Text(node.device),
                when(node.last_seen),
                str(node.received),
                Text(_standing(node)),
                f"{node.checks}, {node.failed_checks} failed" if node.failed_checks else str(node.checks),
                "" if node.banned_at is None else f"since {when(node.banned_at)}",
                Text(node.invite),
            )
    Console(width=1_000).print(table)  # Independent of the terminal's width: scripts read the table.


def ban(run_directory: RunArgument, node: NodesArgument) -> None:
    """Ban nodes: the hub ends their connections within seconds, refuses them, and changes the run's key."""
    with store_of(RunDirectory(run_directory)) as store:
        for node_id in _known_nodes(store, node):
            noted(store, Ban(node=node_id))
    typer.echo(f"Banned: {', '.join(node)}. To let one in again: echo-hub unban {run_directory} NODE")


def unban(run_directory: RunArgument, node: NodesArgument) -> None:
    """Let banned nodes take part again."""
    with store_of(RunDirectory(run_directory)) as store:
        for node_id in _known_nodes(store, node):
            noted(store, Unban(node=node_id))
    typer.echo(f"May take part again: {', '.join(node)}")


def pardon(run_directory: RunArgument, node: NodesArgument) -> None:
    """Let quarantined nodes start again: all their rollouts are checked before the learner trains on them."""
    from echo_hub.store.reports import read_leaderboard

    with store_of(RunDirectory(run_directory)) as store:
        known = {row.node_id: row for row in store.read(read_leaderboard)}
        wrong = [node_id for node_id in _known_nodes(store, node) if known[node_id].standing != "quarantined"]
        if wrong:
            raise ConfigError(
                "These nodes are not in quarantine; nothing was changed.",
                got=", ".join(sorted(wrong)),
                do=f"See how they stand: echo-hub nodes {run_directory}",
            )
        for node_id in node:
            noted(store, Pardon(node=node_id))
    typer.echo(f"Pardoned: {', '.join(node)}. A hub that serves lets them begin anew within seconds.")


def _known_nodes(store: Store, node_ids: list[str]) -> list[str]:
    """Return `node_ids` unchanged. Raises ConfigError unless all these nodes have joined this run."""
    from echo_hub.store.reports import read_leaderboard

    unknown = set(node_ids) - {node.node_id for node in store.read(read_leaderboard) if node.first_seen}
    if unknown:
        raise ConfigError(
            "No such node has ever joined this run; nothing was changed.",
            got=", ".join(sorted(unknown)),
            do="Take the ids that this prints: echo-hub nodes RUN",
        )
    return node_ids


def _standing(node: NodeTotals) -> str:
    reason = f": {node.standing_reason}" if node.standing_reason else ""
    return f"{node.standing}{reason}"
