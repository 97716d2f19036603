"""Update rows of rollouts. Each update states the state that it expects, and fails if a row is in another state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Update

from echo_hub.store.bulk import execute_many
from echo_shared.errors import LocalProtocolError

Rows = list[dict[str, Any]]


def key_of(rollout_id: str) -> tuple[int, int]:
    """Return the lease and index in a rollout's id."""
    lease_id, _, index = rollout_id.partition("-")
    return int(lease_id), int(index)


def rows_of(rollout_ids: Iterable[str], **values: Any) -> Rows:
    """Return one parameter row for each rollout: its lease as "lease", its index as "at", and these values."""
    return [{"lease": lease, "at": index, **values} for lease, index in map(key_of, rollout_ids)]


def change(connection: Connection, statement: Update, rows: Rows, what: str) -> None:
    """Execute the statement for each row. Raises LocalProtocolError if a row changes nothing."""
    check_changed(execute_many(connection, statement, rows), len(rows), what)


def check_changed(changed: int, wanted: int, what: str) -> None:
    """Raise LocalProtocolError if an update changed another number of rollouts than it had to."""
    if changed != wanted:
        raise LocalProtocolError(
            "The coordinator's records do not fit the store; no record of this turn was written.",
            got=f"{changed} of {wanted} rollouts could be {what}",
        )
