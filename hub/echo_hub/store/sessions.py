"""Losses of sessions. In a session, an environment with state plays an episode. Each episode that lost a session has a
row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Final

from sqlalchemy import BigInteger, Column, Connection, Integer, Table, bindparam, delete, select, update

from echo_hub.core.accounting.effects import AnswerReplaced, SessionNoted
from echo_hub.core.accounting.snapshot import SessionLosses
from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID
from echo_hub.store.bulk import among, change, check_changed, execute_many, rows_of
from echo_hub.store.payload_rows import bytes_of
from echo_hub.store.reading import in_parts
from echo_hub.store.tables import metadata, payloads, rollouts
from echo_hub.store.tallies import dialect_of
from echo_shared.wire.messages import ReceiptState

session_losses = Table(
    "session_losses",
    metadata,
    Column("group_id", BigInteger, primary_key=True, autoincrement=False),
    Column("index", Integer, primary_key=True, autoincrement=False),
    Column("attempt", Integer, nullable=False),
    Column("losses", Integer, nullable=False),
    Column("replaced", Integer, nullable=False),
)

_KEY: Final = ("group_id", "index")
_REPLACE_SCORE: Final = (
    update(rollouts)
    .where(
        rollouts.c.lease_id == bindparam("lease"),
        rollouts.c.index == bindparam("at"),
        rollouts.c.state == ReceiptState.SCORED,
    )
    .values(
        reward=bindparam("new_reward"),
        components=bindparam("new_components", type_=rollouts.c.components.type),
        turn_reward=bindparam("new_turn_reward"),
    )
)
_REPLACE_IDS: Final = (
    update(payloads)
    .where(payloads.c.lease_id == bindparam("lease"), payloads.c.index == bindparam("at"))
    .values(observation_ids=bindparam("new_observation_ids"))
)
_ROWS: Final = select(session_losses).order_by(session_losses.c.group_id, session_losses.c.index)


def write_losses(connection: Connection, records: Sequence[SessionNoted], now: float) -> None:
    """Store the newest numbers of lost sessions of each episode."""
    newest = {(record.group_id, record.index): asdict(record) for record in records}
    fresh = dialect_of(connection).insert(session_losses)
    values = {name: fresh.excluded[name] for name in ("attempt", "losses", "replaced")}
    connection.execute(fresh.on_conflict_do_update(index_elements=list(_KEY), set_=values), list(newest.values()))


def write_replaced(connection: Connection, records: Sequence[AnswerReplaced], now: float) -> None:
    """Replace environments' answers to scored turns."""
    newest = {record.rollout_id: record for record in records}.values()
    scores = [
        row
        for record in newest
        for row in rows_of(
            [record.rollout_id],
            new_reward=record.reward,
            new_components=record.components,
            new_turn_reward=None if record.observation_ids is None else record.turn_reward,
        )
    ]
    change(connection, _REPLACE_SCORE, scores, "answered again")
    ids = [
        row
        for record in newest
        for row in rows_of(
            [record.rollout_id],
            new_observation_ids=None if record.observation_ids is None else bytes_of(record.observation_ids),
        )
    ]
    check_changed(execute_many(connection, _REPLACE_IDS, ids), len(ids), "answered again")


def read_session_losses(connection: Connection, group_ids: Iterable[int]) -> tuple[SessionLosses, ...]:
    """Return the session losses of episodes in these groups, ordered by group and index."""
    return tuple(
        SessionLosses(**row._mapping)
        for part in in_parts(group_ids)
        for row in connection.execute(_ROWS.where(among(connection, session_losses.c.group_id, part)))
    )


def read_evaluations_losses(connection: Connection) -> tuple[SessionLosses, ...]:
    """Return the session losses of evaluations that nodes sample."""
    rows = connection.execute(_ROWS.where(session_losses.c.group_id >= FIRST_EVALUATION_ID))
    return tuple(SessionLosses(**row._mapping) for row in rows)


def forget_losses(connection: Connection, group_ids: Iterable[int]) -> None:
    """Delete the losses of groups whose rollouts are deleted."""
    connection.execute(delete(session_losses).where(among(connection, session_losses.c.group_id, group_ids)))
