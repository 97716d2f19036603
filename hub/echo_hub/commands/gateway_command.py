"""`echo-hub gateway`: hold nodes' connections for a hub on this or another machine."""

from __future__ import annotations

from typing import Annotated

import typer

from echo_hub.commands.until_stopped import run_until_stopped
from echo_hub.config.file import load_config, render_config
from echo_hub.config.sections import HubConfig
from echo_hub.lifecycle.beside_hub import RunArgument
from echo_hub.run.directory import RunDirectory
from echo_shared.settings import without_secrets
from echo_shared.signing import key_file
from echo_shared.signing.identity import Identity, fingerprint


def gateway(
    run_directory: RunArgument,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port, shared by all gateways on one machine; 0 = any free port."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the effective settings, secrets masked.")] = False,
) -> None:
    """Hold nodes' connections for a running hub, and pass messages to it through gateways.url.

    RUN is the hub's run directory; on another machine, a directory with copies of its config.toml and hub.key.
    """
    directory = RunDirectory(run_directory)
    directory.check()
    flags = {key: value for key, value in {"host": host, "port": port}.items() if value is not None}
    config = load_config(directory.config, {"gateways": flags})
    if dry_run:
        typer.echo(render_config(without_secrets(config)))
        return
    stopped = "its nodes reconnect elsewhere"
    run_until_stopped(_serve(config, key_file.load(directory.key)), stopped=stopped)


async def _serve(config: HubConfig, me: Identity) -> None:
    from echo_hub.gateways.process import open_gateway

    async with open_gateway(config, me) as opened:
        typer.echo(f"Gateway  {opened.server.url}\nFor      {config.run.name}, key {fingerprint(me.public_key)}")
        await opened.serve()
