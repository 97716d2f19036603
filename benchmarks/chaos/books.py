"""Checks of the rows of the database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, Select, func, select
from sqlalchemy.exc import OperationalError, ProgrammingError

from echo_hub.core.trust.standing import StandingState
from echo_hub.store.changing import key_of
from echo_hub.store.tables import evaluations, groups, rollouts, steps, trust
from echo_shared.books import EvaluationKind
from echo_shared.messages import ReceiptState


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """`acknowledged` counts rollouts that were acknowledged to nodes, `quarantined` counts nodes; every node is
    honest."""

    acknowledged: int
    lost_after_ack: int
    trained_twice: int
    identity_holds: bool
    quarantined: int


def newest_step(engine: Engine) -> int | None:
    """Return the newest trained step, or None for a silent or empty database."""
    found = _first(engine, select(func.max(steps.c.step)).where(steps.c.trained_at.is_not(None)))
    return None if found is None else int(found[0] or 0)


def newest_evaluation(engine: Engine, *, of_version: int | None = None) -> tuple[int, float] | None:
    """Return the newest evaluated version, or `of_version`, with its greedy held-out accuracy, or None if there is none
    yet."""
    wanted = select(evaluations.c.policy_version, evaluations.c.accuracy).where(
        evaluations.c.kind == EvaluationKind.GREEDY.value
    )
    if of_version is not None:
        wanted = wanted.where(evaluations.c.policy_version == of_version)
    row = _first(engine, wanted.order_by(evaluations.c.policy_version.desc()).limit(1))
    return None if row is None else (int(row[0]), float(row[1]))


def _first(engine: Engine, wanted: Select[Any]) -> Any:
    """Return the first row, or None for an empty result or a silent database."""
    try:
        with engine.connect() as connection:
            return connection.execute(wanted).first()
    except (OperationalError, ProgrammingError):
        return None


def check(engine: Engine, acknowledged: Collection[str]) -> Books:
    """Check the database after the end of the hub."""
    with engine.connect() as connection:
        rows = connection.execute(
            select(
                rollouts.c.lease_id,
                rollouts.c["index"].label("member"),
                rollouts.c.group_id,
                rollouts.c.turn,
                rollouts.c.state,
                rollouts.c.drop_reason,
                rollouts.c.final_at,
            )
        ).all()
        trained = connection.execute(select(steps.c.rollout_ids).where(steps.c.trained_at.is_not(None))).all()
        num_groups = connection.scalar(select(func.count()).select_from(groups))
        quarantined = connection.scalar(
            select(func.count()).select_from(trust).where(trust.c.state == StandingState.QUARANTINED)
        )
    by_id = {(row.lease_id, row.member): row for row in rows}
    lost = sum((row := by_id.get(key_of(one))) is None or row.state == ReceiptState.LEASED for one in acknowledged)
    members = Counter(
        (by_id[key].group_id, by_id[key].member, by_id[key].turn) for (ids,) in trained for key in map(key_of, ids)
    )
    finals = {ReceiptState.TRAINED, ReceiptState.EVALUATED, ReceiptState.DROPPED}
    ended = sum(row.state in finals for row in rows)
    in_flight = sum(row.final_at is None for row in rows)
    without_reason = sum(row.state == ReceiptState.DROPPED and row.drop_reason is None for row in rows)
    in_steps = sum(members.values())
    is_trained = sum(row.state == ReceiptState.TRAINED for row in rows)
    return Books(
        acknowledged=len(acknowledged),
        lost_after_ack=lost,
        trained_twice=sum(count - 1 for count in members.values()),
        identity_holds=bool(num_groups)
        and len(rows) == ended + in_flight
        and not without_reason
        and in_steps == is_trained,
        quarantined=int(quarantined or 0),
    )
