"""This node's identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from echo_node.commands.options import DataDir, Force, Json
from echo_node.host.paths import NodePaths
from echo_shared.errors import ConfigError, StorageError
from echo_shared.files.atomic import write_private
from echo_shared.signing import key_file
from echo_shared.signing.identity import Identity, fingerprint

app = typer.Typer(help="This node's identity.", no_args_is_help=True)


@app.command("show")
def id_show(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Print this node's id and fingerprint."""
    me = key_file.load_or_create(NodePaths.find(data_dir).identity_key)
    if as_json:
        typer.echo(json.dumps(_about(me)))
        return
    typer.echo(f"node id      {me.node_id}")
    typer.echo(f"fingerprint  {fingerprint(me.public_key)}")


@app.command("export")
def id_export(
    file: Annotated[Path, typer.Argument(help="Where to write the key.")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Write the node's secret key to a file, to move the node to another computer."""
    key = NodePaths.find(data_dir).identity_key
    me = key_file.load_or_create(key)
    if file.exists():
        raise ConfigError("The file exists already.", got=str(file), do="Choose another name.")
    _copy_key(key, file)
    if as_json:
        typer.echo(json.dumps({**_about(me), "file": str(file)}))
        return
    typer.echo(f"{me.node_id} is in {file}. Keep this file secret: its holder can act as this node.")


@app.command("import")
def id_import(
    file: Annotated[Path, typer.Argument(help="A key that `id export` wrote.")],
    data_dir: DataDir = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Become the node whose key is in a file."""
    paths = NodePaths.find(data_dir)
    me = key_file.load(file)
    with paths.lock():
        if paths.identity_key.exists() and not force:
            mine = key_file.load(paths.identity_key)
            if mine.node_id != me.node_id:
                raise ConfigError(
                    "This node already has an identity.",
                    got=mine.node_id,
                    do="Replace it with: echo-node id import --force",
                )
        _copy_key(file, paths.identity_key)
    typer.echo(json.dumps(_about(me)) if as_json else f"This node is now {me.node_id}.")


def _about(me: Identity) -> dict[str, str]:
    return {"node_id": me.node_id, "public_key": me.public_key.hex(), "fingerprint": fingerprint(me.public_key)}


def _copy_key(source: Path, target: Path) -> None:
    try:
        write_private(target, source.read_bytes())
    except OSError as error:
        raise StorageError("The key cannot be copied.", got=f"{target}: {error.strerror}") from error
