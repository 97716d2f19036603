"""What became of the newest rollouts and how long they were, and how old the newest batches' were. Reads only, as much
on the last day as on the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, func, select

from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID
from echo_hub.store.tables import rollouts, steps
from echo_shared.messages import ReceiptState

IN_FLIGHT: Final = "in flight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """Completions of training that came to the same, and are as long."""

    outcome: str
    """`trained`, the reason they were dropped for, or IN_FLIGHT."""
    num_tokens: int
    rollouts: int
    """How many they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAges:
    """One trained step's batch."""

    step: int
    staleness: tuple[int, ...]
    """Of each group."""


def read_lengths(connection: Connection, newest: int) -> list[Length]:
    """Of the `newest` leased rollouts those for training that have come in. Counted by the database: with each row that
    is read a thread asks for the interpreter anew, which it gets late from a hub that is busy."""
    columns = (rollouts.c.group_id, rollouts.c.state, rollouts.c.drop_reason, rollouts.c.num_tokens)
    of_newest = select(*columns).order_by(rollouts.c.lease_id.desc()).limit(newest).subquery()
    alike = (of_newest.c.state, of_newest.c.drop_reason, of_newest.c.num_tokens)
    came_in = (of_newest.c.num_tokens.is_not(None), of_newest.c.group_id < FIRST_EVALUATION_ID)
    rows = connection.execute(select(*alike, func.count().label("number")).where(*came_in).group_by(*alike))
    return [
        Length(outcome=_outcome(row.state, row.drop_reason), num_tokens=row.num_tokens, rollouts=row.number)
        for row in rows
    ]


def _outcome(state: str, drop_reason: str | None) -> str:
    if drop_reason is not None:
        return drop_reason
    return state if state == ReceiptState.TRAINED else IN_FLIGHT


def read_batch_ages(connection: Connection, newest: int) -> list[BatchAges]:
    """Of the `newest` planned steps those that are trained, newest first."""
    rows = connection.execute(
        select(steps.c.step, steps.c.staleness, steps.c.trained_at).order_by(steps.c.step.desc()).limit(newest)
    )
    return [BatchAges(step=row.step, staleness=tuple(row.staleness)) for row in rows if row.trained_at is not None]
