"""Outcomes of operators' actions, and changed settings, as the coordinator records them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, insert, select, update

from echo_hub.core.accounting.effects import ActionSettled, SettingRecorded
from echo_hub.store.tables import actions, live_settings


def settle(connection: Connection, records: Sequence[ActionSettled], now: float) -> None:
    """Record outcomes of actions. A recorded outcome stays: after a crash, the hub may carry out the same action a
    second time.
    """
    for record in records:
        of_it = (actions.c.number == record.number, actions.c.outcome == "wanted")
        connection.execute(
            update(actions)
            .where(*of_it)
            .values(
                outcome="done" if record.done else "refused",
                settled_at=now,
                before=record.before,
                after=record.after,
                detail=record.detail,
            )
        )


def note_settings(connection: Connection, records: Sequence[SettingRecorded]) -> None:
    """Store the newest value of each setting. Safe without an upsert: the store has one writer."""
    for name, stored in {record.setting: record.stored for record in records}.items():
        of_name = live_settings.c.name == str(name)
        if connection.execute(update(live_settings).where(of_name).values(value=stored)).rowcount == 0:
            connection.execute(insert(live_settings), {"name": str(name), "value": stored})


def read_settings(connection: Connection) -> dict[str, Any]:
    """Return the settings that operators have changed, by name."""
    return {row.name: row.value for row in connection.execute(select(live_settings))}
