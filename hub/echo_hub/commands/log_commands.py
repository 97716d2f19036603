"""`echo-hub log`, `events` and `alert-test`: show a hub's log and a run's events, and test its alerts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echo_hub.config.file import load_config
from echo_hub.config.operation_sections import LogLevel
from echo_hub.lifecycle.beside_hub import RunArgument, store_of, when
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError, EchoError
from echo_shared.logs.log_reader import LogReader

LOOK_S: Final = 0.25
LEVELS: Final[tuple[str, ...]] = ("debug", "info", "warning", "error", "critical")


def log(
    run_directory: RunArgument,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of last lines.")] = 40,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines, until Ctrl-C.")] = False,
    level: Annotated[LogLevel, typer.Option(help="Lowest level: debug, info, warning or error.")] = "debug",
    as_json: Annotated[bool, typer.Option("--json", help="Print the raw JSON objects, one per line.")] = False,
) -> None:
    """Print the log of a run's hub. The hub need not run."""
    from echo_hub.operation.log_lines import KEPT, path_of

    directory = RunDirectory(run_directory)
    directory.check()
    path = path_of(directory.root)
    file = LogReader(path, kept=KEPT)
    fitting = [*_at_least(level, file.last(_looked_at(lines, level)))]
    _print(fitting[max(0, len(fitting) - lines) :], as_json=as_json)
    if not path.exists():
        typer.echo(f"No hub has written a log yet: {path}", err=True)
    while follow:
        _print(_at_least(level, file.more()), as_json=as_json)
        time.sleep(LOOK_S)


def _looked_at(lines: int, level: str) -> int:
    """Return the number of the log's last lines to read: `lines`, or all if `level` leaves out some lines."""
    return lines if level == "debug" or not lines else 2**31


def _at_least(level: str, lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:  # A crash of the machine has truncated this line.
            continue
        if isinstance(said, dict) and _place(said.get("level")) >= _place(level):
            yield line, said


def _place(level: object) -> int:
    return LEVELS.index(level) if isinstance(level, str) and level in LEVELS else len(LEVELS)


def _print(lines: Iterable[tuple[str, dict[str, Any]]], *, as_json: bool) -> None:
    for line, said in lines:
        if as_json:
            typer.echo(line)
            continue
        mark = "" if said.get("level") in ("info", "debug") else f"{said.get('level', '')}: ".upper()
        typer.echo(f"{_local(said.get('time'))} {mark}{_shown(said.get('message', ''))}")
        if "exception" in said:
            typer.echo("\n".join(f"    {_shown(each)}" for each in str(said["exception"]).splitlines()))


def _local(at: object) -> str:
    try:
        return f"{datetime.fromisoformat(str(at)).replace(tzinfo=UTC).astimezone():%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return "?"


def _shown(text: object) -> str:
    from echo_shared.wire.messages.fields import printable_line

    return printable_line(str(text))


def events(
    run_directory: RunArgument,
    kind: Annotated[str, typer.Option(help="Only this kind, such as node_joined or problem_began.")] = "",
    severity: Annotated[str, typer.Option(help="Lowest severity: info, warning or error.")] = "",
    subject: Annotated[str, typer.Option(help="Only this node id or other subject.")] = "",
    before: Annotated[int | None, typer.Option(min=1, help="Only before this number; continues a list.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Most events to print.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """List the events of a run, the newest first: joins, bans, restarts, refusals, problems, and the end of the run."""
    from echo_hub.dashboard.log_page import WrongLogQueryError, event_filter_of
    from echo_hub.dashboard.responses import jsonable
    from echo_hub.store.events import read_events

    asked = {"kind": kind, "severity": severity, "subject": subject, "before": "" if before is None else str(before)}
    try:
        wanted = event_filter_of(asked)
    except WrongLogQueryError as error:
        raise ConfigError(
            "The filter for events is invalid.", got=str(error), do="See: echo-hub events --help"
        ) from error
    with store_of(RunDirectory(run_directory)) as store:
        found = store.read(read_events, wanted, limit)
    if as_json:
        typer.echo(json.dumps({"events": jsonable(found)}, indent=2, allow_nan=False))
        return
    table = Table("Number", "Time", "Kind", "Severity", "Subject", "What", box=None)
    for event in found:
        table.add_row(str(event.number), when(event.at), event.kind, event.severity, event.subject, Text(event.text))
    Console(width=1_000).print(table)  # Wide regardless of the terminal: people copy ids from it, and scripts read it.
    if len(found) == limit:
        typer.echo(f"There may be more: --before {found[-1].number}")


def alert_test(run_directory: RunArgument) -> None:
    """Send a test alert to the run's webhook, and report whether it was accepted."""
    from echo_hub.operation.alert import AboutRun, Alert
    from echo_hub.operation.alerting import new_id, webhook_of

    directory = RunDirectory(run_directory)
    directory.check()
    config = load_config(directory.config, {})
    webhook = webhook_of(config.alerts)
    if webhook is None:
        raise ConfigError(
            "This run sends no alerts: it has no webhook.",
            got="alerts.webhook_url is empty",
            do=f"Set it in {directory.config}",
        )
    now, text = time.time(), "This is a test: alerts of this run arrive."
    alert = Alert(alert_id=new_id(), kind="test", state="test", text=text, at=now, since=now)
    about = AboutRun(run_id="", name=_shown(config.run.name), url=config.server.public_url)
    try:
        asyncio.run(webhook.send(alert, about))
    except EchoError as error:
        typer.echo(f"webhook: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo("webhook: accepted")
