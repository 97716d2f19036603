"""What became of the newest rollouts and how long they were, and how old the newest batches' were. Reads only, as much
on the last day as on the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, select

from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID
from echo_hub.store.tables import rollouts, steps
from echo_shared.messages import ReceiptState

IN_FLIGHT: Final = "in flight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """One completion of training."""

    outcome: str
    """`trained`, the reason it was dropped for, or IN_FLIGHT."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAges:
    """One trained step's batch."""

    step: int
    staleness: tuple[int, ...]
    """Of each group."""


def read_lengths(connection: Connection, newest: int) -> list[Length]:
    """Of the `newest` leased rollouts those for training that have come in."""
    rows = connection.execute(
        select(rollouts.c.group_id, rollouts.c.state, rollouts.c.drop_reason, rollouts.c.num_tokens)
        .order_by(rollouts.c.lease_id.desc())
        .limit(newest)
    )
    return [
        Length(outcome=_outcome(row.state, row.drop_reason), num_tokens=row.num_tokens)
        for row in rows
        if row.num_tokens is not None and row.group_id < FIRST_EVALUATION_ID
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
