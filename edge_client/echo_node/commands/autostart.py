"""Commands for the service that starts the node at login."""

from __future__ import annotations

import json
import os

import typer

from echo_node.commands.options import DataDir, Json, last_hub
from echo_node.host import service
from echo_node.host.paths import HOME_VARIABLE, NodePaths

app = typer.Typer(help="Start the node by itself when you log in.", no_args_is_help=True)


@app.command("install")
def service_install(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Start the node now and at every login."""
    paths = NodePaths.find(data_dir)
    record = last_hub(paths)
    found = _service(paths)
    service.install(found)
    if as_json:
        typer.echo(json.dumps({"hub": record.url, "file": str(found.path)}))
        return
    typer.echo(f"The node works for {record.url} from now on. Its service file: {found.path}")


@app.command("uninstall")
def service_uninstall(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Stop the service and remove it."""
    removed = service.uninstall(_service(NodePaths.find(data_dir)))
    if as_json:
        typer.echo(json.dumps({"removed": removed}))
        return
    typer.echo("The service is removed." if removed else "There was no service.")


@app.command("status")
def service_status(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Print the system's report on the service."""
    found = _service(NodePaths.find(data_dir))
    said = service.status(found)
    if as_json:
        said = json.dumps({"installed": found.path.exists(), "file": str(found.path), "said": said})
    typer.echo(said)


def _service(paths: NodePaths) -> service.Service:
    home = os.environ.get(HOME_VARIABLE)
    return service.for_this_platform(paths.data_dir, {} if home is None else {HOME_VARIABLE: home})
