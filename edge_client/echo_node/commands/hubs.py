"""Commands for the joined hubs and their shares of the node's time."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echo_node.commands.options import DataDir, Json, joined_hub
from echo_node.core.shares import HubShare
from echo_node.host.hubs import Hubs
from echo_node.host.paths import NodePaths
from echo_node.host.shares import SharesFile

app = typer.Typer(help="The hubs that this node has joined.", no_args_is_help=True)


@app.command("list")
def hubs_list(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the joined hubs, newest first, with their shares of this node's time."""
    found = _hubs_with_shares(NodePaths.find(data_dir))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    table = Table("hub", "run", "share", "worked lately", "last")
    for one in found:
        share = "-" if one["share"] is None else f"{one['share']:.0%}"
        last = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["joined_at"]))
        table.add_row(Text(one["url"]), Text(one["run_name"]), share, f"{one['worked_s'] / 3_600:.1f} h", last)
    Console().print(table)
    if all(one["share"] is None for one in found):
        typer.echo("The node works only for the first one. To work for several: echo-node hubs share URL SHARE")


@app.command("share")
def hubs_share(
    url: Annotated[str, typer.Argument(help="The hub's address.")],
    share: Annotated[float, typer.Argument(min=0, max=1_000_000, help="Weight relative to the other hubs; 0 = none.")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Set a hub's share of the node's time. A running node uses it from the next turn on."""
    paths = NodePaths.find(data_dir)
    record, file = joined_hub(paths, url), SharesFile(paths.shares_file)
    hubs = file.load()
    file.save({**hubs, record.url: hubs.get(record.url, HubShare()).model_copy(update={"share": share})})
    found = _hubs_with_shares(paths)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for one in found:
        if one["share"] is not None:
            typer.echo(f"{one['url']}  {one['share']:.0%}")


def _hubs_with_shares(paths: NodePaths) -> list[dict[str, Any]]:
    """Return the hubs as JSON fields. `share`: fraction of the node's time, in [0, 1]; None if no hub has a share, so
    that the first hub gets all time.
    """
    shares, now = SharesFile(paths.shares_file).load(), time.time()
    records = Hubs(paths).all()
    total = sum(shares[record.url].share for record in records if record.url in shares)
    return [
        {
            "url": record.url,
            "run_name": record.run_name,
            "joined_at": record.joined_at,
            "share": shares.get(record.url, HubShare()).share / total if total else None,
            "worked_s": shares.get(record.url, HubShare()).counted_s(now),
        }
        for record in records
    ]
