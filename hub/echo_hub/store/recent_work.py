"""Outcomes and lengths of the newest rollouts, and the staleness (age in versions) of the newest batches. Reads only.
The cost does not grow with the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, func, select

from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID
from echo_hub.store.tables import rollouts, steps
from echo_shared.wire.messages import ReceiptState

IN_FLIGHT: Final = "in flight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCount:
    """Number of training completions with the same outcome and length."""

    outcome: str
    """"trained", the drop reason, or IN_FLIGHT for a rollout that is not final."""
    num_tokens: int
    rollouts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAges:
    """Staleness of the groups in one trained step's batch."""

    step: int
    staleness: tuple[int, ...]
    """Staleness of each group, in versions: how far its policy was behind the policy being trained."""


def read_lengths(connection: Connection, newest: int) -> list[LengthCount]:
    """Count the received training completions among the `newest` leased rollouts, by outcome and length.

    The database counts: SQLite's driver takes Python's GIL for each row, which is slow in a busy hub.
    """
    columns = (rollouts.c.group_id, rollouts.c.state, rollouts.c.drop_reason, rollouts.c.num_tokens)
    of_newest = select(*columns).order_by(rollouts.c.lease_id.desc()).limit(newest).subquery()
    alike = (of_newest.c.state, of_newest.c.drop_reason, of_newest.c.num_tokens)
    came_in = (of_newest.c.num_tokens.is_not(None), of_newest.c.group_id < FIRST_EVALUATION_ID)
    rows = connection.execute(select(*alike, func.count().label("number")).where(*came_in).group_by(*alike))
    return [
        LengthCount(outcome=_outcome(row.state, row.drop_reason), num_tokens=row.num_tokens, rollouts=row.number)
        for row in rows
    ]


def _outcome(state: str, drop_reason: str | None) -> str:
    if drop_reason is not None:
        return drop_reason
    return state if state == ReceiptState.TRAINED else IN_FLIGHT


def read_batch_ages(connection: Connection, newest: int) -> list[BatchAges]:
    """Return the staleness of each trained step among the `newest` planned steps, newest first."""
    rows = connection.execute(
        select(steps.c.step, steps.c.staleness, steps.c.trained_at).order_by(steps.c.step.desc()).limit(newest)
    )
    return [BatchAges(step=row.step, staleness=tuple(row.staleness)) for row in rows if row.trained_at is not None]
