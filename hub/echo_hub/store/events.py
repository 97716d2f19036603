"""Events of a run in the store. Only the newest events of each kind are kept, so kinds that are frequent, or that
strangers can cause, do not displace other kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from sqlalchemy import Connection, bindparam, delete, insert, select

from echo_hub.store.at_once import rows_at_once
from echo_hub.store.tables import events
from echo_shared.records.run import EventFilter, RunEvent, Severity

KEPT: Final = 2_000
"""Default number of events kept for each kind."""
_NEWEST: Final = select(events).order_by(events.c.number.desc()).limit(bindparam("most"))
_FROM: Final = {severity.value: tuple(Severity)[place:] for place, severity in enumerate(Severity)}
"""Maps a severity to the list of itself and all higher severities."""


def add_events(connection: Connection, new: Sequence[RunEvent], *, kept: int) -> None:
    """Insert events in order; the database numbers them. Then delete the oldest events of each kind beyond `kept`."""
    rows = [asdict(event) for event in new]
    for row in rows:
        del row["number"]
    connection.execute(insert(events), rows)
    for kind in {event.kind for event in new}:
        of_kind = events.c.kind == kind
        newest_too_many = select(events.c.number).where(of_kind).order_by(events.c.number.desc()).offset(kept).limit(1)
        number = connection.scalar(newest_too_many)
        if number is not None:
            connection.execute(delete(events).where(of_kind, events.c.number <= number))


def read_events(connection: Connection, wanted: EventFilter, limit: int) -> list[RunEvent]:
    """Return at most `limit` events that match the filter, newest first."""
    query = _NEWEST
    if wanted.kind:
        query = query.where(events.c.kind == wanted.kind)
    if wanted.severity:
        query = query.where(events.c.severity.in_(_FROM[wanted.severity]))
    if wanted.subject:
        query = query.where(events.c.subject == wanted.subject)
    if wanted.before is not None:
        query = query.where(events.c.number < wanted.before)
    rows = rows_at_once(connection, query, {"most": limit})
    return [RunEvent(**{**row._mapping, "severity": Severity(row.severity)}) for row in rows]
