"""`echo-hub act`, `undo`, `audit` and `tokens`: actions of operators, entered on the hub's own computer.

The commands store the action as a request in the run's database. A running hub carries it out within a second; a
stopped hub carries it out at its next start.
"""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echo_hub.actions.records import ActionOutcome, ActionRecord, Actor
from echo_hub.actions.requests import (
    TABLE,
    AnyRequest,
    MakeToken,
    WrongRequestError,
    request_of,
    summary,
    taking_back,
)
from echo_hub.actions.tenant_keys import key_lines
from echo_hub.lifecycle.beside_hub import RunArgument, store_of, when
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError

if TYPE_CHECKING:
    from echo_hub.store.store import Store

LOOK_S: Final = 0.1
LONGEST: Final = 10_000

WaitOption = Annotated[
    float, typer.Option("--wait", min=0, max=3600, metavar="SECONDS", help="Wait up to this long for the hub to do it.")
]


def me() -> Actor:
    """Return the author of this command's actions: the current user of this computer."""
    user = "somebody"
    with suppress(OSError, KeyError):  # In a container, the user id may have no name.
        user = getpass.getuser()
    return Actor(via="cli", who=user)


def act(
    run_directory: RunArgument,
    action: Annotated[
        str | None, typer.Argument(metavar="[ACTION]", help="Without it, all actions are listed.")
    ] = None,
    values: Annotated[
        list[str] | None, typer.Argument(metavar="[VALUE...]", help="Its fields in order, or as NAME=VALUE.")
    ] = None,
    wait_s: WaitOption = 5.0,
) -> None:
    """Change a run that is being served: pause it, change settings, publish, invite. Every action is logged."""
    from echo_hub.oversight.secrets_made import secret_of

    if action is None:
        _list_actions()
        return
    try:
        request = request_of(action, _fields(action, values or ()))
    except WrongRequestError as error:
        raise ConfigError(
            "The action is invalid.", got=str(error), do=f"List all actions: echo-hub act {run_directory}"
        ) from error
    secret, secret_hash = secret_of(request)
    with store_of(RunDirectory(run_directory)) as store:
        record = noted(store, request, wait_s=wait_s, secret_hash=secret_hash)
    tell(record)
    if secret:
        typer.echo(f"Shown only once: {secret}")
    if isinstance(request, MakeToken) and request.scope == "use":
        typer.echo("\n".join(key_lines(secret)))


def undo(
    run_directory: RunArgument,
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="As `echo-hub audit` prints it.", min=1)],
    wait_s: WaitOption = 5.0,
) -> None:
    """Undo an action, if it can be undone."""
    from echo_hub.store.actions import find_action, was_undone

    with store_of(RunDirectory(run_directory)) as store:
        record = store.read(find_action, number)
        request = None if record is None else taking_back(record.action, record.request, record.before)
        if (
            record is None
            or request is None
            or record.outcome is not ActionOutcome.DONE
            or store.read(was_undone, number)
        ):
            raise ConfigError(
                "This action cannot be undone.",
                got=f"action {number}" + (f": {record.action}, {record.outcome}" if record else ": there is none"),
                do=f"List the actions: echo-hub audit {run_directory}",
            )
        tell(noted(store, request, wait_s=wait_s, undoes=number))


def audit(
    run_directory: RunArgument,
    newest: Annotated[int, typer.Option(min=1, max=LONGEST, help="Number of newest actions.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """List the operators' actions: author, time, action, and the values before and after it."""
    from echo_hub.store.actions import read_action_log

    with store_of(RunDirectory(run_directory)) as store:
        records = store.read(read_action_log, limit=newest)
    if as_json:
        typer.echo(json.dumps({"actions": [asdict(record) for record in records]}, indent=2))
        return
    table = Table("Number", "When", "Who", "By", "Action", "Outcome", "Before", "After", "Detail", box=None)
    for one in records:
        what = " ".join([one.action, *(f"{name}={value}" for name, value in one.request.items() if value is not None)])
        table.add_row(
            str(one.number),
            when(one.asked_at),
            Text(one.who),
            one.via,
            Text(what if one.undoes is None else f"{what} (undoes {one.undoes})"),
            one.outcome,
            Text(_plain(one.before)),
            Text(_plain(one.after)),
            Text(one.detail),
        )
    Console(width=1_000).print(table)  # Use a width that no terminal limits, because scripts read the table.


def tokens(
    run_directory: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """List API tokens; `act RUN token NAME` creates one, `act RUN revoke_token NAME` revokes it."""
    from echo_hub.store.actions import read_api_tokens

    with store_of(RunDirectory(run_directory)) as store:
        made = store.read(read_api_tokens)
    if as_json:
        listed = [{name: value for name, value in asdict(one).items() if name != "token_hash"} for one in made]
        typer.echo(json.dumps({"tokens": listed}, indent=2))
        return
    table = Table("Name", "Scope", "Made", "Expires", "Revoked", box=None)
    for one in made:
        table.add_row(
            Text(one.name), one.scope, when(one.created_at), when(one.expires_at), when(one.revoked_at or 0.0)
        )
    Console(width=1_000).print(table)


def noted(
    store: Store, request: AnyRequest, *, wait_s: float = 0.0, undoes: int | None = None, secret_hash: str = ""
) -> ActionRecord:
    """Store a request in the database, wait up to `wait_s` for its outcome, and return its record."""
    from echo_hub.store.actions import note_action

    record = store.write(note_action, request, me(), time.time(), undoes=undoes, secret_hash=secret_hash)
    return _settled(store, record, time.monotonic() + wait_s)


def _settled(store: Store, record: ActionRecord, until: float) -> ActionRecord:
    from echo_hub.store.actions import find_action

    while record.outcome is ActionOutcome.WANTED and time.monotonic() < until:
        time.sleep(LOOK_S)
        record = store.read(find_action, record.number) or record
    return record


def tell(record: ActionRecord) -> None:
    """Print an action's outcome; for a pending action, say when the hub carries it out. Raises ConfigError if it was
    refused."""
    if record.outcome is ActionOutcome.REFUSED:
        raise ConfigError(f"{record.action} was refused.", got=record.detail)
    if record.outcome is ActionOutcome.WANTED:
        typer.echo(f"Stored as action {record.number}. The hub carries it out as soon as it runs.")
        return
    values = (record.before, record.after)
    changed = "" if values == (None, None) else ": " + " -> ".join(_plain(value) or "unset" for value in values)
    typer.echo(" ".join(filter(None, [f"Done, action {record.number}{changed}.", record.detail])))


def _fields(action: str, values: Sequence[str]) -> dict[str, Any]:
    """Assign the values of the command line to the action's fields. Raises WrongRequestError if there are too many."""
    names = [name for name in TABLE[action].model_fields if name != "action"] if action in TABLE else []
    fields: dict[str, Any] = {}
    places = iter(names)
    for value in values:
        name, equals, rest = value.partition("=")
        if equals and name in names:
            fields[name] = rest
            continue
        free = next((place for place in places if place not in fields), None)
        if free is None and action in TABLE:
            raise WrongRequestError(f"{action} takes {', '.join(names) or 'nothing'}; {value!r} is too much")
        fields[free or value] = value
    return fields


def _list_actions() -> None:
    table = Table("Action", "Fields", "What it does", box=None)
    for name, kind in TABLE.items():
        fields = [f"{field}{'' if info.is_required() else '?'}" for field, info in kind.model_fields.items()]
        table.add_row(name, " ".join(field for field in fields if field != "action?"), summary(kind))
    Console(width=200).print(table)


def _plain(value: Any) -> str:
    return "" if value is None else str(value)
