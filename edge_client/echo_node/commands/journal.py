"""The command that prints the node's log."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from typing import Annotated, Final

import typer

from echo_node.commands.options import DataDir, Json
from echo_node.host.paths import NodePaths
from echo_shared.logs.log_reader import LogReader

LOOK_S: Final = 0.25
_ENTRY: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (.*)", re.DOTALL)
"""First line of a log entry, with its local time. Lines of another form, such as a traceback, continue the entry."""


def log(
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of last lines to print.")] = 40,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new lines, until Ctrl-C.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Print the node's log, even if no node runs; with --json, one object per line."""
    path = NodePaths.find(data_dir).logs / "node.log"
    file = LogReader(path)
    _print(file.last(lines), as_json=as_json)
    if not path.exists():
        typer.echo(f"No node has written a log here: {path}", err=True)
    while follow:
        _print(file.more(), as_json=as_json)
        time.sleep(LOOK_S)


def _print(lines: Iterable[str], *, as_json: bool) -> None:
    for line in lines:
        if as_json:
            entry = _ENTRY.fullmatch(line)
            at, text = (None, line) if entry is None else entry.groups()
            typer.echo(json.dumps({"at": at, "text": text}))
        else:
            typer.echo(line)
