"""`echo-hub credit` and `echo-hub team`: transfer credit between runs, and manage teams."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from echo_hub.config.file import load_config
from echo_hub.lifecycle.beside_hub import RunArgument, store_of
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError
from echo_shared.records import run_credit
from echo_shared.signing import key_file
from echo_shared.signing.identity import fingerprint

credit = typer.Typer(help="Transfer nodes' credit between runs.", no_args_is_help=True)
team = typer.Typer(help="The teams of a run's nodes.", no_args_is_help=True)


@credit.command("export")
def credit_export(run_directory: RunArgument) -> None:
    """Print what every node has earned in this run, signed with the hub's key, for import by other hubs."""
    from echo_hub.store.database import read_meta
    from echo_hub.store.elsewhere import read_run_credit

    directory = RunDirectory(run_directory)
    with store_of(directory) as store:
        me, run_id = key_file.load(directory.key), store.read(read_meta).get("run_id")
        if run_id is None:
            raise ConfigError("This run has not been served yet.", do=f"Serve it first: echo-hub serve {run_directory}")
        name = load_config(directory.config, {}).run.name
        said = store.read(read_run_credit, run_id=run_id, run_name=name, hub_key=me.public_key, now=time.time())
    typer.echo(run_credit.sign(said, me).decode(), nl=False)
    typer.echo(f"{_nodes(len(said.nodes))}. The hub's key: {fingerprint(me.public_key)}", err=True)


@credit.command("import")
def credit_import(
    run_directory: RunArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Output of `credit export`.")],
    hub_key: Annotated[
        str | None,
        typer.Option("--hub-key", help="The other hub's key or fingerprint, from its operator; needed once per hub."),
    ] = None,
) -> None:
    """Add the credit from another run to this run's leaderboard, next to its own credit, for nodes with the same keys.

    A newer export of the same run replaces the older one.
    """
    from echo_hub.store.database import read_meta
    from echo_hub.store.elsewhere import read_known_hubs, take_in

    said = run_credit.verified(_read(file))
    key = bytes.fromhex(said.hub_key)
    with store_of(RunDirectory(run_directory)) as store:
        if said.run_id == store.read(read_meta).get("run_id"):
            raise ConfigError("This is the run's own credit; nothing was changed.", got=said.run_id)
        if hub_key is not None and hub_key.replace(" ", "").lower() not in (
            said.hub_key,
            fingerprint(key).replace(" ", ""),
        ):
            raise ConfigError("The export is signed by another hub; nothing was changed.", got=fingerprint(key))
        if hub_key is None and said.hub_key not in store.read(read_known_hubs):
            raise ConfigError(
                "The signature is valid, but its hub is unknown to this run: anyone may have made the export.",
                got=f"a hub's key with the fingerprint {fingerprint(key)}",
                do="Ask that hub's operator for its fingerprint, then pass it: --hub-key FINGERPRINT",
            )
        taken = store.write(take_in, said, time.time())
    name = f"run {said.run_name} ({said.run_id}), as of {said.issued_at}"
    if taken == "known":
        typer.echo(f"Already imported, or older than the imported one: {name}. Nothing was changed.")
    else:
        typer.echo(f"Added {_nodes(len(said.nodes))} of the {name}.")


@team.command("remove")
def team_remove(
    run_directory: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="As shown on the teams page.")],
) -> None:
    """Remove a team and its credit, for example because of its name. Its nodes keep their own credit."""
    from echo_hub.store.teams import remove_team

    with store_of(RunDirectory(run_directory)) as store:
        if not store.write(remove_team, name):
            raise ConfigError("No team has this name; nothing was changed.", got=name)
    typer.echo(f"Removed the team {name}.")


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(run_credit.MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError("The export cannot be read.", got=f"{file}: {error.strerror}") from error


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count:,} nodes"
