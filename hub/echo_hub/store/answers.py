"""Groups of tenants' samples, one row per group. A row is deleted when its group is settled: a while after its last
sample was delivered (`echo_hub.tenants.node_drawer`).

A row holds what makes the group's samples reproducible: prompt, version, seed and sampling parameters. Finished samples
are rollouts in the state `answered`; their tokens stay in `payloads` as long as the row exists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    LargeBinary,
    String,
    Table,
    bindparam,
    delete,
    func,
    insert,
    select,
    update,
)

from echo_hub.core.accounting.effects import AnswerOpened, AnswersCancelled, RolloutsAnswered
from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.answer_groups import FIRST_ANSWER_ID, AnswerGroup, AnswerMember
from echo_hub.store.bulk import among, change, execute_many, key_of, rows_of
from echo_hub.store.column_types import Unsigned64
from echo_hub.store.credit import grant
from echo_hub.store.keeping import Keeping, forget
from echo_hub.store.payload_rows import bytes_of, ids_of
from echo_hub.store.reading import in_parts
from echo_hub.store.retired import read_last_answer
from echo_hub.store.tables import metadata, rollouts
from echo_hub.store.tallies import ANSWERED, tally
from echo_shared.wire.messages import ReceiptState, rollout_id

answers = Table(
    "answers",
    metadata,
    Column("group_id", BigInteger, primary_key=True, autoincrement=False),
    Column("tenant_id", String(64), nullable=False),
    Column("policy_version", BigInteger, nullable=False),
    Column("seed", Unsigned64, nullable=False),
    Column("prompt_ids", LargeBinary, nullable=False),
    Column("sampling", JSON, nullable=False),
    Column("is_checked", Boolean, nullable=False),
    Column("members", JSON, nullable=False),
    Column("opened_at", Double, nullable=False),
)

_NEW: Final = insert(answers)
_ANSWER: Final = (
    update(rollouts)
    .where(
        rollouts.c.lease_id == bindparam("lease"),
        rollouts.c.index == bindparam("at"),
        rollouts.c.state == ReceiptState.RECEIVED,
    )
    .values(state=ReceiptState.ANSWERED, final_at=bindparam("at_s"))
)
_FORGET_NOTHING_ELSE: Final = Keeping(share=0.0)
"""No copies of tenants' samples are kept for people to read."""


def write_opened(connection: Connection, records: Sequence[AnswerOpened], now: float) -> None:
    rows = [
        {
            "group_id": group.group_id,
            "tenant_id": group.tenant_id,
            "policy_version": group.policy_version,
            "seed": group.seed,
            "prompt_ids": bytes_of(group.prompt_ids),
            "sampling": asdict(group.sampling),
            "is_checked": group.is_checked,
            "members": [asdict(member) for member in group.members],
            "opened_at": now,
        }
        for group in (record.group for record in records)
    ]
    execute_many(connection, _NEW, rows)


def write_cancelled(connection: Connection, records: Sequence[AnswersCancelled], now: float) -> None:
    for record in records:
        of_it = answers.c.group_id == record.group_id
        stored = connection.scalar(select(answers.c.members).where(of_it))
        if stored is not None:
            members = [
                asdict(replace(member, is_cancelled=member.is_cancelled or member.request_id == record.request_id))
                for member in _members(stored)
            ]
            connection.execute(update(answers).where(of_it).values(members=members))


def write_answered(connection: Connection, records: Sequence[RolloutsAnswered], now: float) -> Collection[str]:
    """Mark rollouts of tenants' requests as answered, and give credit for them. Their tokens stay until the group is
    settled (deleted).
    """
    ids = [rollout_id for record in records for rollout_id in record.rollout_ids]
    change(connection, _ANSWER, rows_of(ids, at_s=now), "answered")
    earned = tally(connection, list(map(key_of, ids)), ANSWERED)
    grant(connection, earned, at=now, step=None)
    return earned.keys()


def read_open_answers(connection: Connection) -> tuple[tuple[AnswerGroup, ...], frozenset[tuple[int, int]]]:
    """Return all groups that are not settled (deleted), and the (group, index) of each answered sample of these
    groups."""
    groups = tuple(_group(row) for row in connection.execute(select(answers).order_by(answers.c.group_id)))
    return groups, frozenset(read_answered(connection, [group.group_id for group in groups]))


def read_answer_groups(connection: Connection, group_ids: Iterable[int]) -> dict[int, AnswerGroup]:
    """Return the groups with these ids, by id. Settled groups have no row and are left out."""
    return {
        row.group_id: _group(row)
        for part in in_parts(group_ids)
        for row in connection.execute(select(answers).where(among(connection, answers.c.group_id, part)))
    }


def read_answered(connection: Connection, group_ids: Iterable[int]) -> dict[tuple[int, int], str]:
    """Return the id of the rollout that answered each index of these groups, by (group, index)."""
    columns = select(rollouts.c.group_id, rollouts.c.index.label("at"), rollouts.c.lease_id, rollouts.c.state)
    return {
        (row.group_id, row.at): rollout_id(row.lease_id, row.at)
        for part in in_parts(group_ids)
        for row in connection.execute(columns.where(among(connection, rollouts.c.group_id, part)))
        # Filter by state here: with a condition in the query, SQLite might scan all rows of that state.
        if row.state == ReceiptState.ANSWERED
    }


def read_next_answer_id(connection: Connection) -> int:
    """Return the smallest group id that no tenant's request has used, as far as the database shows: rows of old
    requests may be gone.
    """
    newest = (
        connection.scalar(select(func.max(answers.c.group_id))),
        connection.scalar(select(func.max(rollouts.c.group_id))),
        read_last_answer(connection),
    )
    return max(FIRST_ANSWER_ID, *(1 + (each or 0) for each in newest))


def settle_answers(connection: Connection, group_ids: Collection[int]) -> None:
    """Delete these groups, and the tokens of their samples. Their receipts stay."""
    keys = [key_of(name) for name in read_answered(connection, group_ids).values()]
    if keys:
        forget(connection, keys, _FORGET_NOTHING_ELSE)
    for part in in_parts(group_ids):
        connection.execute(delete(answers).where(among(connection, answers.c.group_id, part)))


def _group(row: Any) -> AnswerGroup:
    sampling = row.sampling
    return AnswerGroup(
        group_id=row.group_id,
        tenant_id=row.tenant_id,
        prompt_ids=ids_of(row.prompt_ids),
        policy_version=row.policy_version,
        seed=row.seed,
        sampling=SamplingParameters(
            temperature=sampling["temperature"],
            max_tokens=sampling["max_tokens"],
            stop_ids=tuple(sampling["stop_ids"]),
            stop_strings=tuple(sampling["stop_strings"]),
        ),
        is_checked=row.is_checked,
        members=_members(row.members),
    )


def _members(stored: Sequence[Mapping[str, Any]]) -> tuple[AnswerMember, ...]:
    return tuple(AnswerMember(**member) for member in stored)
