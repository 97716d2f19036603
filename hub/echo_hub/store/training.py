"""Record a trained step: mark the step as trained at once, then its rollouts in parts.

    train            steps.trained_at                     uncounted: one row for each part, with its leases
    count_trained    rollouts.state, tallies, credit      uncounted: that row is deleted

Each line is one transaction. Other writes run in between, so a step of thousands of rollouts delays no other rollout.
After a restart, counting continues where the last process ended. A step with a single part is counted in the
transaction that marks it as trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from sqlalchemy import Connection, delete, func, insert, select, update

from echo_hub.core.accounting.effects import StepTrained
from echo_hub.store.bulk import among, check_changed, key_of
from echo_hub.store.credit import grant
from echo_hub.store.tables import rollouts, steps, uncounted
from echo_hub.store.tallies import TRAINED, dropped_of, final_so_far, tally_leases
from echo_shared.errors import LocalProtocolError
from echo_shared.wire.messages import ReceiptState

COUNTED_AT_ONCE: Final = 512
"""Largest number of rollouts whose rows change in one transaction. Such a transaction takes a few milliseconds."""
CHANGED_A_STATEMENT: Final = 64
"""Number of leases in one UPDATE. A lease may hold all rollouts of a group, and PostgreSQL updates all indexes for each
row.
"""


def train(connection: Connection, records: Sequence[StepTrained], now: float) -> Collection[str]:
    """Mark steps as trained. Steps whose rollouts form a single part are also counted. Return the nodes whose totals
    changed.
    """
    touched: set[str] = set()
    for record in records:
        changed = connection.execute(
            update(steps)
            .where(steps.c.step == record.step, steps.c.trained_at.is_(None))
            .values(
                trained_at=record.trained_at, metrics=dict(record.metrics), dropped=dropped_of(final_so_far(connection))
            )
        ).rowcount
        if changed != 1:
            raise LocalProtocolError(
                "The trained step was never planned or is already trained; no record of this turn was written.",
                got=f"step {record.step}",
            )
        parts = list(_parts(record))
        scored = sum(_num_scored(connection, part) for part in parts)
        check_changed(scored, len(record.rollout_ids), "trained")
        several = list(map(key_of, record.drawn_by_several))
        if len(parts) == 1:
            touched |= _count(connection, parts[0], several, step=record.step, at=now)
        for number, part in enumerate(parts if len(parts) > 1 else ()):
            of_part = set(part)
            connection.execute(
                insert(uncounted),
                {
                    "step": record.step,
                    "part": number,
                    "lease_ids": part,
                    "drawn_by_several": [key for key in several if key[0] in of_part],
                    "at": now,
                },
            )
    return touched


def uncounted_steps(connection: Connection) -> Sequence[int]:
    """Return the trained steps whose rollouts are not all counted yet, in order."""
    return connection.scalars(select(uncounted.c.step).distinct().order_by(uncounted.c.step)).all()


def count_trained(connection: Connection) -> Collection[str]:
    """Mark the next part of the oldest uncounted step's rollouts as trained, and update the totals.

    Return the nodes whose totals changed.
    """
    row = connection.execute(select(uncounted).order_by(uncounted.c.step, uncounted.c.part).limit(1)).one_or_none()
    if row is None:
        return ()
    connection.execute(delete(uncounted).where(uncounted.c.step == row.step, uncounted.c.part == row.part))
    return _count(connection, row.lease_ids, list(map(tuple, row.drawn_by_several)), step=row.step, at=row.at)


def _parts(record: StepTrained) -> Iterator[list[int]]:
    """Yield the leases of each part of the step. Leases of one node are adjacent, so that most nodes' totals are
    updated only once or twice.
    """
    sizes = Counter(key_of(rollout_id)[0] for rollout_id in record.rollout_ids)
    node_of = {key_of(each)[0]: node_id for each, node_id in zip(record.rollout_ids, record.node_ids, strict=False)}
    part: list[int] = []
    in_part = 0
    for lease_id in sorted(sizes, key=lambda lease_id: (node_of.get(lease_id, ""), lease_id)):
        if in_part + sizes[lease_id] > COUNTED_AT_ONCE and part:
            yield part
            part, in_part = [], 0
        part.append(lease_id)
        in_part += sizes[lease_id]
    if part:
        yield part


def _num_scored(connection: Connection, lease_ids: Sequence[int]) -> int:
    of_these = among(connection, rollouts.c.lease_id, lease_ids), rollouts.c.state == ReceiptState.SCORED
    return connection.scalar(select(func.count(rollouts.c.index)).where(*of_these)) or 0


def _count(
    connection: Connection,
    lease_ids: Sequence[int],
    drawn_by_several: Collection[tuple[int, int]],
    *,
    step: int,
    at: float,
) -> set[str]:
    for start in range(0, len(lease_ids), CHANGED_A_STATEMENT):
        of_these = among(connection, rollouts.c.lease_id, lease_ids[start : start + CHANGED_A_STATEMENT])
        connection.execute(
            update(rollouts)
            .where(of_these, rollouts.c.state == ReceiptState.SCORED)
            .values(state=ReceiptState.TRAINED, final_at=at)
        )
    earned = tally_leases(connection, lease_ids, drawn_by_several, TRAINED)
    grant(connection, earned, at=at, step=step)
    return set(earned)
