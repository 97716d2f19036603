"""`echo-hub tenants`: show the use of each tenant."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echo_hub.config.file import load_config
from echo_hub.lifecycle.beside_hub import RunArgument, store_of, when
from echo_hub.run.directory import RunDirectory
from echo_shared.records.tenant import TenantTotals


def tenants(
    run_directory: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON, with the newest errors.")] = False,
) -> None:
    """List the tenants: what each uses, and what it may use. `act RUN token NAME scope=use` makes a tenant's token,
    `act RUN tenant_quota NAME TOKENS` sets its quota, `act RUN block_tenant NAME` refuses its requests."""
    from echo_hub.dashboard.responses import jsonable
    from echo_hub.tenants.overview import read_overview

    directory = RunDirectory(run_directory)
    with store_of(directory) as store:
        config = load_config(directory.config, {}).tenants
        found = store.read(read_overview, tokens_per_day=config.tokens_per_day, now=time.time())
    if as_json:
        typer.echo(json.dumps(jsonable(found), indent=2))
        return
    titles = ("Tenant", "Token", "Sessions", "Models", "Open requests", "Answered today", "Tokens today", "Quota a day")
    table = Table(*titles, "Tokens in 30 days", "Saved bytes", box=None)
    for one in found.tenants:
        table.add_row(
            Text(one.tenant_id),
            _state(one),
            *map(str, (one.sessions, one.models, one.queued, one.requests_today, one.tokens_today)),
            f"{one.tokens_per_day or 'no limit'}{', its own' if one.has_own_quota else ''}",
            *map(str, (one.recent_tokens, one.saved_bytes)),
        )
    Console(width=1_000).print(table)  # Use a width that no terminal limits, because scripts read the table.
    for failure in found.failures:
        what = f"{when(failure.at)}  {failure.tenant_id}  {failure.kind} failed: {failure.error}"
        Console(width=1_000).print(Text(" ".join(what.split())))


def _state(one: TenantTotals) -> str:
    if one.blocked_at is not None:
        return f"blocked since {when(one.blocked_at)}"
    return "none" if one.token_expires_at is None else f"until {when(one.token_expires_at)}"
