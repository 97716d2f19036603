"""Commands for receipts and certificates: the fate of the node's work in local and hub records."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from echo_node.certificate_picture import picture
from echo_node.commands.options import DataDir, Json, last_hub
from echo_node.core.agreement import Agreement, compare
from echo_node.host.address import HubAddress
from echo_node.host.hubs import HubRecord, Hubs
from echo_node.host.paths import NodePaths
from echo_node.host.pause import seconds_of
from echo_node.host.spool import Spool, SpoolEntry
from echo_node.net.books import HubBooks
from echo_shared.errors import ConfigError, EchoError, StorageError
from echo_shared.files.atomic import write_private
from echo_shared.records import contribution
from echo_shared.records.contribution import Contribution
from echo_shared.signing import key_file
from echo_shared.signing.identity import fingerprint
from echo_shared.wire.credentials import MOST_RECEIPTS
from echo_shared.wire.messages import Receipt
from echo_shared.wire.messages.receipts import check_in_words

app = typer.Typer(help="The fate of the node's work, here and on the hub.", invoke_without_command=True)

NEWEST: Final = 20
State = Literal["leased", "sent", "received", "scored", "trained", "evaluated", "answered", "dropped"]
Offline = Annotated[bool, typer.Option("--offline", help="Do not ask the hub.")]


@app.callback()
def _by_itself(context: typer.Context) -> None:
    """Show the state of the node's rollouts, on this node and on the hub. Without a command: list the newest."""
    if context.invoked_subcommand is None:
        receipts_list()


@app.command("list")
def receipts_list(
    state: Annotated[State | None, typer.Option("--state", help="Only this state on the node.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Changed in the last 2h, 3d ..., or since 2026-11-24[T18:00].")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=MOST_RECEIPTS, help="At most this many.")] = NEWEST,
    offline: Offline = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Print rollouts, newest first, with this node's state and the hub's."""
    paths = NodePaths.find(data_dir)
    record = last_hub(paths)
    spool = _open_spool(paths, record)
    try:
        found = [] if spool is None else spool.entries(state=state, since=_epoch_s(since), limit=limit)
    finally:
        if spool is not None:
            spool.close()
    said, problem = _ask(paths, record, [entry.rollout_id for entry in found], offline=offline)
    rows = [_row(entry.rollout_id, entry, said.get(entry.rollout_id)) for entry in found]
    if as_json:
        about = {"hub": record.url, "run_id": record.run_id, "problem": problem, "receipts": rows}
        typer.echo(json.dumps(about, indent=2))
        return
    for line in _table(rows, asked=not offline and not problem):
        typer.echo(line)
    if problem:
        typer.echo(f"The hub was not asked: {problem}", err=True)


@app.command("show")
def receipts_show(
    rollout_id: Annotated[str, typer.Argument(help="The id from `receipts list`: LEASE-INDEX.")],
    offline: Offline = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Print one rollout, with this node's state and the hub's."""
    paths = NodePaths.find(data_dir)
    record = last_hub(paths)
    _check_id(rollout_id)
    spool = _open_spool(paths, record)
    try:
        entry = None if spool is None else spool.entry(rollout_id)
    finally:
        if spool is not None:
            spool.close()
    said, problem = _ask(paths, record, [rollout_id], offline=offline)
    row = _row(rollout_id, entry, said.get(rollout_id))
    if as_json:
        typer.echo(json.dumps({"hub": record.url, "run_id": record.run_id, "problem": problem, **row}, indent=2))
        return
    typer.echo(f"rollout  {rollout_id}")
    typer.echo(f"node     {_described(row) if entry else 'unknown: never leased here, returned, or forgotten'}")
    if row["hub"] is not None:
        typer.echo(f"hub      {_described(row['hub'])}")
    elif problem:
        typer.echo(f"hub      not asked: {problem}")
    if row["sentence"]:
        typer.echo(f"         {row['sentence']}")


@app.command("certificate")
def receipts_certificate(
    out: Annotated[Path, typer.Option("--out", help="The certificate's file; a picture is put next to it.")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Get a certificate of this node's work for the run, signed by the hub, and a picture of it."""
    paths = NodePaths.find(data_dir)
    record = last_hub(paths)
    shown = out.with_suffix(".svg")
    if out == shown:
        raise ConfigError("The certificate is not a picture.", got=str(out), do="Choose another: --out NAME.json")
    for file in (out, shown):
        if file.exists():
            raise ConfigError("This file exists already.", got=str(file), do="Choose another: --out NAME.json")
    document, said = _books(paths, record).certificate()
    try:
        write_private(out, document)
        write_private(shown, picture(said).encode())
    except OSError as error:
        raise StorageError("The certificate cannot be written.", got=f"{out}: {error.strerror}") from error
    if as_json:
        typer.echo(json.dumps({"file": str(out), "picture": str(shown), "certificate": said.model_dump()}, indent=2))
        return
    for line in _certified(said):
        typer.echo(line)
    typer.echo(f"Written: {out}, and as a picture {shown}. Anyone can check it: echo-node receipts verify {out}")


@app.command("verify")
def receipts_verify(
    file: Annotated[Path, typer.Argument(help="A certificate from `receipts certificate`.")],
    hub_key: Annotated[
        str | None,
        typer.Option("--hub-key", help="The hub's key or its fingerprint, from its operator; default: known hubs."),
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Check a certificate without the hub: it must be unchanged, and signed by a known hub's key."""
    try:
        said = contribution.verified(file.read_bytes())
    except OSError as error:
        raise ConfigError("The certificate cannot be read.", got=f"{file}: {error.strerror}") from error
    key = bytes.fromhex(said.hub_key)
    if hub_key is not None:
        known = hub_key.replace(" ", "").lower() in (said.hub_key, fingerprint(key).replace(" ", ""))
    else:
        known = any(record.hub_key == key for record in Hubs(NodePaths.find(data_dir)).all())
    if not known:
        raise ConfigError(
            "The certificate is unchanged, but its hub is unknown here: anyone may have made and signed it.",
            got=f"a hub's key with the fingerprint {fingerprint(key)}",
            do="Ask the hub's operator for its fingerprint, then: echo-node receipts verify FILE --hub-key FINGERPRINT",
            code="unknown_hub",
        )
    if as_json:
        typer.echo(json.dumps({"valid": True, "certificate": said.model_dump()}, indent=2))
        return
    typer.echo("The certificate is unchanged, and signed by the hub's key.")
    for line in _certified(said):
        typer.echo(line)


def _open_spool(paths: NodePaths, record: HubRecord) -> Spool | None:
    """Open the node's spool (its store of rollouts) for the hub; None if there is none."""
    file = Hubs(paths).directory(record) / "spool.db"
    if not file.exists():
        return None
    spool = Spool(file)
    spool.open()
    return spool


def _books(paths: NodePaths, record: HubRecord) -> HubBooks:
    me = key_file.load_or_create(paths.identity_key)
    address = HubAddress(origin=record.url)  # `join` has checked the address.
    return HubBooks(address, me=me, hub_key=record.hub_key, invite_token=record.invite_token)


def _ask(
    paths: NodePaths, record: HubRecord, rollout_ids: Sequence[str], *, offline: bool
) -> tuple[Mapping[str, Receipt], str]:
    """Return the hub's receipts by rollout id, and "" or the reason why the hub could not be asked."""
    if offline:
        return {}, ""
    try:
        return _books(paths, record).receipts(rollout_ids), ""
    except EchoError as error:
        return {}, error.brief + (f" {error.do}" if error.do else "")


def _epoch_s(since: str | None) -> float:
    if since is None:
        return 0.0
    try:
        return datetime.fromisoformat(since).astimezone().timestamp()
    except ValueError:
        return time.time() - seconds_of(since)


def _check_id(rollout_id: str) -> None:
    lease, dash, index = rollout_id.partition("-")
    if not (dash and lease.isdecimal() and index.isdecimal() and rollout_id.isascii() and len(rollout_id) <= 48):
        raise ConfigError(
            "This is not the id of a rollout.", got=rollout_id, do="They look like 1203-4: echo-node receipts list"
        )


def _row(rollout_id: str, entry: SpoolEntry | None, hubs: Receipt | None) -> dict[str, Any]:
    """Return one rollout's fields for JSON. `hub` is None without an answer of the hub."""
    mine = {"rollout_id": rollout_id, "state": None, "drop_reason": None, "checked": None, "changed_at": None}
    row: dict[str, Any] = mine if entry is None else asdict(entry)
    row |= {"hub": None, "agreement": None, "sentence": ""}
    if hubs is not None:
        row["hub"] = {
            "state": hubs.state.value,
            "drop_reason": hubs.drop_reason and hubs.drop_reason.value,
            "checked": hubs.checked.value,
        }
        if entry is not None:
            found = compare(entry.state, entry.drop_reason, entry.checked, hubs)
            row |= {"agreement": found.agreement.value, "sentence": found.sentence}
    return row


def _described(about: Mapping[str, Any]) -> str:
    reason = f" ({about['drop_reason']})" if about["drop_reason"] else ""
    said = check_in_words(about["checked"], about["drop_reason"])
    return f"{about['state']}{reason}" + ("" if about["checked"] == "no" else f", checked: {said}")


def _table(rows: Sequence[Mapping[str, Any]], *, asked: bool) -> list[str]:
    if not rows:
        return ["The node has no such rollouts."]
    cells = [("ROLLOUT", "SINCE", "NODE", "HUB" if asked else "")]
    for row in rows:
        hubs = (
            "" if row["hub"] is None else "the same" if row["agreement"] == Agreement.SAME else _described(row["hub"])
        )
        cells.append((row["rollout_id"], _time(row["changed_at"]), _described(row), hubs))
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]).rstrip()
        for line in cells
    ]
    meanings = dict.fromkeys(row["sentence"] for row in rows if row["sentence"])
    for sentence in meanings:
        of = [row["rollout_id"] for row in rows if row["sentence"] == sentence]
        which = ", ".join(of[:4]) + (f" and {len(of) - 4} more" if len(of) > 4 else "")
        lines.append(f"{which}: {sentence}")
    return lines


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}" if seconds else "-"


def _certified(said: Contribution) -> list[str]:
    return [
        f"node       {said.node_name} ({said.node_id})",
        f"run        {said.run_name} ({said.run_id})",
        f"hub's key  {fingerprint(bytes.fromhex(said.hub_key))}",
        f"from       {said.first_seen} to {said.last_seen}, issued at {said.issued_at}",
        f"trained    {said.trained_rollouts} rollouts, {said.trained_tokens} tokens",
        f"evaluated  {said.evaluated_rollouts} rollouts, {said.evaluated_tokens} tokens",
        f"answered   {said.answered_rollouts} rollouts, {said.answered_tokens} tokens",
        f"checked    {said.checks_passed} found honest, {said.checks_failed} not",
        f"for others {said.others_checked_rollouts} rollouts, {said.others_checked_tokens} tokens recomputed",
    ]
