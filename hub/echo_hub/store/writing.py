"""Write the records of one pass of the coordinator as bulk SQL statements.

Records are applied kind by kind, in the order of a rollout's life: leased, received, scored, evaluated, answered,
planned, trained or dropped. So one pass may take a rollout through several states. Every UPDATE names the state that it
expects. If a row is in another state, the whole pass is rolled back, so a final state never changes. Results of checks
have a separate column, because they may arrive after the rollout is final.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from sqlalchemy import Connection, bindparam, func, insert, select, update

from echo_hub.core.accounting.effects import (
    ActionSettled,
    AnswerOpened,
    AnswerReplaced,
    AnswersCancelled,
    CheckingCredited,
    CheckRecorded,
    CoarseClassesRecorded,
    CostAccrued,
    GroupDropped,
    GroupOpened,
    GroupsRated,
    Record,
    RolloutReceived,
    RolloutsAnswered,
    RolloutsDropped,
    RolloutsEvaluated,
    RolloutsLeased,
    ScoreRecorded,
    SessionNoted,
    SettingRecorded,
    StandingRecorded,
    StepPlanned,
    StepTrained,
    TrustDecided,
    VersionRecorded,
)
from echo_hub.store import old_receipts
from echo_hub.store.actions import note_settings, settle
from echo_hub.store.answers import write_answered, write_cancelled, write_opened
from echo_hub.store.bulk import Rows, among, change, check_changed, execute_many, key_of, rows_of
from echo_hub.store.credit import grant
from echo_hub.store.payload_rows import bytes_of, row_of
from echo_hub.store.sessions import write_losses, write_replaced
from echo_hub.store.standings import write_coarse_classes, write_decisions, write_standings
from echo_hub.store.tables import groups, payloads, rollouts, steps, versions
from echo_hub.store.tallies import (
    EVALUATED,
    tally,
    tally_checking,
    tally_costs,
)
from echo_hub.store.training import train
from echo_shared.records.rewards import mean_components
from echo_shared.wire.messages import DropReason, ReceiptState

_FINAL = (ReceiptState.TRAINED, ReceiptState.EVALUATED, ReceiptState.ANSWERED, ReceiptState.DROPPED)
_KEY = (rollouts.c.lease_id == bindparam("lease"), rollouts.c.index == bindparam("at"))
_NEW_GROUPS, _NEW_ROLLOUTS, _NEW_PAYLOADS = insert(groups), insert(rollouts), insert(payloads)
_RECEIVE = (
    update(rollouts)
    .where(*_KEY, rollouts.c.state == ReceiptState.LEASED)
    .values(
        state=ReceiptState.RECEIVED, num_tokens=bindparam("new_num_tokens"), received_at=bindparam("new_received_at")
    )
)
_SCORE = (
    update(rollouts)
    .where(*_KEY, rollouts.c.state == ReceiptState.RECEIVED)
    .values(
        state=ReceiptState.SCORED,
        reward=bindparam("new_reward"),
        components=bindparam("new_components", type_=rollouts.c.components.type),
        turn_reward=bindparam("new_turn_reward"),
        scored_at=bindparam("at_s"),
    )
)
_ANSWER = (
    update(payloads)
    .where(payloads.c.lease_id == bindparam("lease"), payloads.c.index == bindparam("at"))
    .values(observation_ids=bindparam("new_observation_ids"))
)
_DROP = (
    update(rollouts)
    .where(*_KEY, *(rollouts.c.state != final for final in _FINAL))
    .values(
        state=ReceiptState.DROPPED,
        drop_reason=bindparam("new_reason"),
        detail=bindparam("new_detail"),
        final_at=bindparam("at_s"),
    )
)
_EVALUATE = (
    update(rollouts)
    .where(*_KEY, rollouts.c.state == ReceiptState.SCORED)
    .values(state=ReceiptState.EVALUATED, final_at=bindparam("at_s"))
)
_CHECK = update(rollouts).where(*_KEY).values(checked=bindparam("new_checked"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Effects of the written records on which the caller must act."""

    tokens_gone: list[tuple[int, int]]
    """Rollouts, as (lease, index), whose tokens the hub no longer needs. The caller deletes them."""
    touched: frozenset[str]
    """Ids of nodes whose totals changed by final rollouts, costs or trust standing."""
    has_trained: bool


def write(connection: Connection, records: Sequence[Record], now: float) -> Written:
    """Write the records of one pass of the coordinator.

    Raises LocalProtocolError if a record does not fit the stored rows; the caller then rolls back.
    """
    by_kind: dict[type, list[Any]] = {}
    for record in records:
        by_kind.setdefault(type(record), []).append(record)
    touched: set[str] = set()
    for kind in sorted(by_kind, key=_ORDER.__getitem__):
        touched.update(WRITERS[kind](connection, by_kind[kind], now) or ())
    # Rollouts that the learner left out as forged (SCREENED) keep their tokens: after a crash, the learner may have to
    # repeat their planned batch.
    gone = [record for record in by_kind.get(RolloutsDropped, ()) if record.reason is not DropReason.SCREENED]
    keys = [key_of(rollout_id) for record in gone for rollout_id in record.rollout_ids]
    return Written(tokens_gone=keys, touched=frozenset(touched), has_trained=StepTrained in by_kind)


def _open_groups(connection: Connection, records: Sequence[GroupOpened], now: float) -> None:
    rows = [
        {"group_id": record.group_id, "seed": record.seed, "prompt": record.prompt, "opened_at": now}
        for record in records
    ]
    execute_many(connection, _NEW_GROUPS, rows)


def _rate_groups(connection: Connection, records: Sequence[GroupsRated], now: float) -> None:
    rows = [{"id": group_id, "rate": rate} for record in records for group_id, rate in record.pass_rates]
    connection.execute(
        update(groups).where(groups.c.group_id == bindparam("id")).values(pass_rate=bindparam("rate")), rows
    )


def _lease(connection: Connection, records: Sequence[RolloutsLeased], now: float) -> None:
    rows = [
        {
            "lease_id": record.lease_id,
            "index": index,
            "node_id": record.node_id,
            "group_id": record.group_id,
            "turn": record.turn,
            "policy_version": record.policy_version,
            "leased_at": now,
            "deadline": record.deadline,
            "state": ReceiptState.LEASED,
        }
        for record in records
        for index in record.indices
    ]
    execute_many(connection, _NEW_ROLLOUTS, rows)


def _receive(connection: Connection, records: Sequence[RolloutReceived], now: float) -> None:
    changes: Rows = []
    contents: Rows = []
    for record in records:
        lease_id, index = key_of(record.rollout_id)
        payload = record.payload
        changes.append(
            {
                "lease": lease_id,
                "at": index,
                "new_num_tokens": len(payload.completion_ids),
                "new_received_at": record.received_at,
            }
        )
        contents.append({"lease_id": lease_id, "index": index, **row_of(payload)})
    change(connection, _RECEIVE, changes, "received")
    execute_many(connection, _NEW_PAYLOADS, contents)


def _score(connection: Connection, records: Sequence[ScoreRecorded], now: float) -> None:
    rows = [
        row
        for record in records
        for row in rows_of(
            [record.rollout_id],
            new_reward=record.reward,
            new_components=record.components,
            new_turn_reward=None if record.observation_ids is None else record.turn_reward,
            at_s=now,
        )
    ]
    change(connection, _SCORE, rows, "scored")
    answers = [
        row
        for record in records
        if record.observation_ids is not None
        for row in rows_of([record.rollout_id], new_observation_ids=bytes_of(record.observation_ids))
    ]
    if answers:
        execute_many(connection, _ANSWER, answers)


def _evaluate(connection: Connection, records: Sequence[RolloutsEvaluated], now: float) -> Collection[str]:
    """Mark rollouts as evaluated. Their tokens stay until the evaluation's result is recorded."""
    ids = [rollout_id for record in records for rollout_id in record.rollout_ids]
    change(connection, _EVALUATE, rows_of(ids, at_s=now), "evaluated")
    earned = tally(connection, list(map(key_of, ids)), EVALUATED)
    grant(connection, earned, at=now, step=None)
    return earned.keys()


def _plan(connection: Connection, records: Sequence[StepPlanned], now: float) -> None:
    for record in records:
        tokens, reward = connection.execute(
            select(func.coalesce(func.sum(rollouts.c.num_tokens), 0), func.coalesce(func.avg(rollouts.c.reward), 0.0))
            .where(among(connection, rollouts.c.group_id, record.group_ids))
            .where(rollouts.c.state == ReceiptState.SCORED)
        ).one()
        connection.execute(
            insert(steps),
            {
                "step": record.step,
                "group_ids": list(record.group_ids),
                "rollout_ids": list(record.rollout_ids),
                "staleness": list(record.staleness),
                "num_groups": len(record.group_ids),
                "num_rollouts": len(record.rollout_ids),
                "num_tokens": int(tokens),
                "mean_reward": float(reward),
                "components": _mean_components(connection, record.group_ids),
                "planned_at": record.planned_at,
                "by_task": {key: asdict(figures) for key, figures in record.by_task.items()} or None,
                "pruned": False,
            },
        )
        connection.execute(
            update(groups).where(among(connection, groups.c.group_id, record.group_ids)).values(step=record.step)
        )


def _mean_components(connection: Connection, group_ids: Collection[int]) -> dict[str, float] | None:
    query = select(rollouts.c.components).where(
        rollouts.c.state == ReceiptState.SCORED, rollouts.c.components.is_not(None)
    )
    return mean_components(connection.scalars(query.where(among(connection, rollouts.c.group_id, group_ids))))


def _drop(connection: Connection, records: Sequence[RolloutsDropped], now: float) -> Collection[str]:
    rows = [
        row
        for record in records
        for row in rows_of(record.rollout_ids, new_reason=record.reason, new_detail=record.detail or None, at_s=now)
    ]
    change(connection, _DROP, rows, "dropped")
    by_reason: dict[str, list[tuple[int, int]]] = {}
    for record in records:
        by_reason.setdefault(record.reason.value, []).extend(map(key_of, record.rollout_ids))
    return {node_id for reason, keys in by_reason.items() for node_id in tally(connection, keys, reason)}


def _drop_groups(connection: Connection, records: Sequence[GroupDropped], now: float) -> None:
    rows = [{"id": record.group_id, "reason": record.reason} for record in records]
    statement = update(groups).where(groups.c.group_id == bindparam("id")).values(drop_reason=bindparam("reason"))
    connection.execute(statement, rows)


def _publish(connection: Connection, records: Sequence[VersionRecorded], now: float) -> None:
    """Record published versions. If a restarted hub publishes a version again, the version keeps its first time."""
    for record in records:
        known = select(versions.c.policy_version).where(versions.c.policy_version == record.policy_version)
        if connection.scalar(known) is None:
            connection.execute(
                insert(versions), {"policy_version": record.policy_version, "published_at": record.published_at}
            )


def _accrue(connection: Connection, records: Sequence[CostAccrued], now: float) -> Collection[str]:
    accrued = [cost for record in records for cost in record.nodes]
    tally_costs(connection, accrued)
    return {cost.node_id for cost in accrued}


def _check(connection: Connection, records: Sequence[CheckRecorded], now: float) -> None:
    found = {record.rollout_id: record.checked for record in records}
    rows = [row for rollout_id, checked in found.items() for row in rows_of([rollout_id], new_checked=checked)]
    changed = execute_many(connection, _CHECK, rows)
    if changed != len(rows):  # A check may end after its rollout's row was deleted.
        changed += old_receipts.note_checked(
            connection, {(row["lease"], row["at"]): row["new_checked"] for row in rows}
        )
    check_changed(changed, len(rows), "noted as checked")


def _note_standings(connection: Connection, records: Sequence[StandingRecorded], now: float) -> Collection[str]:
    write_standings(connection, [record.row for record in records])
    return {record.row.node_id for record in records}


def _note_coarse_classes(connection: Connection, records: Sequence[CoarseClassesRecorded], now: float) -> None:
    write_coarse_classes(connection, records[-1].classes)


def _credit(connection: Connection, records: Sequence[CheckingCredited], now: float) -> Collection[str]:
    tally_checking(connection, ((record.node_id, record.num_tokens) for record in records))
    return {record.node_id for record in records}


def _decide(connection: Connection, records: Sequence[TrustDecided], now: float) -> None:
    write_decisions(connection, records)


def _change_settings(connection: Connection, records: Sequence[SettingRecorded], now: float) -> None:
    note_settings(connection, records)


WRITERS: Final[Mapping[type, Callable[[Connection, Sequence[Any], float], Collection[str] | None]]] = {
    GroupOpened: _open_groups,
    GroupsRated: _rate_groups,
    AnswerOpened: write_opened,
    AnswersCancelled: write_cancelled,
    RolloutsLeased: _lease,
    RolloutReceived: _receive,
    ScoreRecorded: _score,
    AnswerReplaced: write_replaced,
    SessionNoted: write_losses,
    RolloutsEvaluated: _evaluate,
    RolloutsAnswered: write_answered,
    StepPlanned: _plan,
    StepTrained: train,
    RolloutsDropped: _drop,
    GroupDropped: _drop_groups,
    VersionRecorded: _publish,
    CostAccrued: _accrue,
    CheckRecorded: _check,
    StandingRecorded: _note_standings,
    CoarseClassesRecorded: _note_coarse_classes,
    CheckingCredited: _credit,
    TrustDecided: _decide,
    SettingRecorded: _change_settings,
    ActionSettled: settle,
}
"""The writer of each kind of record; records are applied in this order. A writer returns the nodes whose totals it
changed.
"""
_ORDER: Final = {kind: place for place, kind in enumerate(WRITERS)}
