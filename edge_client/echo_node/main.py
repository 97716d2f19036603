"""The command `echo-node`: lends this computer to a hub."""

from __future__ import annotations

import asyncio
import sys

import typer

from echo_node.commands import autostart, identity, machine, owner, working
from echo_shared.errors import EchoError

app = typer.Typer(
    name="echo-node",
    help="Lends this computer to a hub that trains a language model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
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
app.command()(machine.doctor)
app.command()(machine.bench)
app.add_typer(identity.app, name="id")
app.add_typer(autostart.app, name="service")


def run() -> None:
    """The entry point: errors as text on standard error, exit status 1; 2 for wrong usage."""
    try:
        app()
    except EchoError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from error
    except asyncio.CancelledError:
        raise SystemExit(130) from None


if __name__ == "__main__":
    run()
