"""The command `echo-node`: lends this computer to a hub."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

import echo_shared
from echo_node.commands import (
    autostart,
    fleet,
    hubs,
    identity,
    journal,
    machine,
    owner,
    receipts,
    settings,
    team,
    working,
)
from echo_shared.errors import EchoError
from echo_shared.files.utf8 import use_utf8, utf8_names

app = typer.Typer(
    name="echo-node",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"echo-node {echo_shared.__version__}")
        raise typer.Exit


@app.callback()
def _about_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and end.")
    ] = False,
) -> None:
    """Lend this computer to a hub that trains a language model."""


app.command()(working.join)
app.command("run")(working.run_command)
app.command()(working.lend)
app.command()(working.leave)
app.command()(owner.status)
app.command()(owner.page)
app.command()(owner.tray)
app.command()(owner.pause)
app.command()(owner.resume)
app.command()(owner.finish)
app.command()(journal.log)
app.command()(machine.doctor)
app.command()(machine.bench)
app.add_typer(hubs.app, name="hubs")
app.add_typer(receipts.app, name="receipts")
app.add_typer(team.app, name="team")
app.add_typer(fleet.app, name="fleet")
app.add_typer(settings.app, name="config")
app.add_typer(identity.app, name="id")
app.add_typer(autostart.app, name="service")


def run() -> None:
    """Run the command. Errors go to standard error, with exit status 1; wrong usage exits with 2."""
    use_utf8()
    try:
        with utf8_names():
            app()
    except EchoError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from error
    except asyncio.CancelledError:
        raise SystemExit(130) from None


if __name__ == "__main__":
    run()
