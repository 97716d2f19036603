"""What hub and learner read back: the snapshot at start, payloads to score, a step's batch, receipts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, and_, func, or_, select, tuple_

from echo_hub.core.payload import RolloutPayload
from echo_hub.core.snapshot import GroupRow, RolloutRow, Snapshot, StepRow
from echo_hub.store.tables import groups, payloads, rollouts, steps, versions
from echo_hub.store.writing import key_of
from echo_shared.errors import StorageError
from echo_shared.messages import MAX_GROUP_SIZE, DropReason, FinishReason, Receipt, ReceiptState, rollout_id

_UNFINISHED = (ReceiptState.LEASED, ReceiptState.RECEIVED, ReceiptState.VERIFIED)
_WITH_PAYLOAD = and_(payloads.c.lease_id == rollouts.c.lease_id, payloads.c.index == rollouts.c.index)

_KEYS_A_QUERY: Final = 1_000
"""Far below what either database takes as parameters of one statement: two a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPayload:
    """A received rollout that is not final."""

    rollout_id: str
    group_id: int
    payload: RolloutPayload


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRollout:
    """One rollout of a step's batch: ids and behaviour logprobs (nats), both [T], and its reward."""

    rollout_id: str
    node_id: str
    policy_version: int
    completion_ids: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroup:
    """One group of a step's batch. Its prompt is not stored: it follows from `group_id`."""

    group_id: int
    seed: int
    rollouts: tuple[BatchRollout, ...]
    """In the order of training."""


def read_snapshot(connection: Connection) -> Snapshot:
    """All that is unfinished."""
    trained = connection.scalar(select(func.max(steps.c.step)).where(steps.c.trained_at.is_not(None))) or 0
    open_groups = connection.execute(
        select(groups.c.group_id, groups.c.seed)
        .where(groups.c.drop_reason.is_(None), or_(groups.c.step.is_(None), groups.c.step > trained))
        .order_by(groups.c.group_id)
    )
    planned = connection.execute(
        select(steps.c.step, steps.c.group_ids, steps.c.rollout_ids).where(steps.c.step == trained + 1)
    ).one_or_none()
    kept = connection.scalars(select(steps.c.step).where(steps.c.trained_at.is_not(None), steps.c.pruned.is_(False)))
    newest_group = connection.scalar(select(func.max(groups.c.group_id)))
    newest_lease = connection.scalar(select(func.max(rollouts.c.lease_id)))
    return Snapshot(
        next_group_id=0 if newest_group is None else newest_group + 1,
        next_lease_id=1 if newest_lease is None else newest_lease + 1,
        groups=tuple(GroupRow(group_id=row.group_id, seed=row.seed) for row in open_groups),
        rollouts=_unfinished(connection),
        trained_steps=trained,
        planned=planned
        and StepRow(step=planned.step, group_ids=tuple(planned.group_ids), rollout_ids=tuple(planned.rollout_ids)),
        published_version=connection.scalar(select(func.max(versions.c.policy_version))) or 0,
        replayable=frozenset(kept),
    )


def _unfinished(connection: Connection) -> tuple[RolloutRow, ...]:
    rows = connection.execute(
        select(
            rollouts.c.lease_id,
            rollouts.c.index.label("at"),
            rollouts.c.node_id,
            rollouts.c.group_id,
            rollouts.c.policy_version,
            rollouts.c.deadline,
            rollouts.c.state,
            rollouts.c.reward,
        )
        .where(rollouts.c.state.in_(_UNFINISHED))
        .order_by(rollouts.c.lease_id, rollouts.c.index)
    )
    return tuple(
        RolloutRow(
            rollout_id=rollout_id(row.lease_id, row.at),
            lease_id=row.lease_id,
            node_id=row.node_id,
            group_id=row.group_id,
            index=row.at,
            policy_version=row.policy_version,
            deadline=row.deadline,
            state=ReceiptState(row.state),
            reward=row.reward,
        )
        for row in rows
    )


def read_payloads(connection: Connection, rollout_ids: Sequence[str]) -> list[StoredPayload]:
    """In the order asked for; those that are not there any more are left out."""
    keys = [key_of(wanted) for wanted in rollout_ids]
    rows = connection.execute(
        select(
            payloads.c.lease_id,
            payloads.c.index.label("at"),
            payloads.c.completion_ids,
            payloads.c.behavior_logprobs,
            payloads.c.finish_reason,
            payloads.c.sampling_s,
            rollouts.c.group_id,
        )
        .join_from(payloads, rollouts, _WITH_PAYLOAD)
        .where(payloads.c.lease_id.in_({lease_id for lease_id, _ in keys}))
    )
    found = {
        (row.lease_id, row.at): StoredPayload(
            rollout_id=rollout_id(row.lease_id, row.at),
            group_id=row.group_id,
            payload=RolloutPayload(
                completion_ids=np.frombuffer(row.completion_ids, dtype="<i4"),
                behavior_logprobs=np.frombuffer(row.behavior_logprobs, dtype="<f4"),
                finish_reason=FinishReason(row.finish_reason),
                sampling_s=row.sampling_s,
            ),
        )
        for row in rows
    }
    return [found[key] for key in keys if key in found]


def read_batch(connection: Connection, step: int) -> list[BatchGroup]:
    """The planned batch, in the order of training. Raises StorageError when it is not, or no longer, in the store."""
    batch = connection.execute(
        select(steps.c.group_ids, steps.c.rollout_ids, steps.c.pruned).where(steps.c.step == step)
    ).one_or_none()
    if batch is None or batch.pruned:
        raise StorageError(
            "The batch of a step is not in the store.",
            got=f"step {step}, {'never planned' if batch is None else 'pruned'}",
            do="Restore the run directory, checkpoints and database together, from one backup.",
        )
    rows = connection.execute(
        select(
            rollouts.c.lease_id,
            rollouts.c.index.label("at"),
            rollouts.c.group_id,
            rollouts.c.node_id,
            rollouts.c.policy_version,
            rollouts.c.reward,
            payloads.c.completion_ids,
            payloads.c.behavior_logprobs,
        )
        .join_from(rollouts, payloads, _WITH_PAYLOAD)
        .where(rollouts.c.group_id.in_(batch.group_ids))
    )
    found = {rollout_id(row.lease_id, row.at): row for row in rows}
    by_group: dict[int, list[BatchRollout]] = {group_id: [] for group_id in batch.group_ids}
    for wanted in batch.rollout_ids:
        row = found[wanted]
        by_group[row.group_id].append(
            BatchRollout(
                rollout_id=wanted,
                node_id=row.node_id,
                policy_version=row.policy_version,
                completion_ids=np.frombuffer(row.completion_ids, dtype="<i4"),
                behavior_logprobs=np.frombuffer(row.behavior_logprobs, dtype="<f4"),
                reward=row.reward,
            )
        )
    seeds = connection.execute(select(groups.c.group_id, groups.c.seed).where(groups.c.group_id.in_(batch.group_ids)))
    seed_of = {row.group_id: row.seed for row in seeds}
    return [
        BatchGroup(group_id=group_id, seed=seed_of[group_id], rollouts=tuple(of_group))
        for group_id, of_group in by_group.items()
    ]


def read_receipts(connection: Connection, node_id: str, asked: Sequence[str]) -> list[Receipt]:
    """What became of each of these, in the order asked for, for their own node; dropped as invalid for others, and
    for ids never leased."""
    keys = list({key for wanted in asked if (key := _possible_key(wanted)) is not None})
    found: dict[str, Receipt] = {}
    for start in range(0, len(keys), _KEYS_A_QUERY):
        rows = connection.execute(
            select(
                rollouts.c.lease_id,
                rollouts.c.index.label("at"),
                rollouts.c.node_id,
                rollouts.c.state,
                rollouts.c.drop_reason,
            ).where(tuple_(rollouts.c.lease_id, rollouts.c.index).in_(keys[start : start + _KEYS_A_QUERY]))
        )
        for row in rows:
            if row.node_id != node_id:  # Not in the query: SQLite would walk the node's index instead of the key's.
                continue
            known = rollout_id(row.lease_id, row.at)
            found[known] = Receipt(
                rollout_id=known,
                state=ReceiptState(row.state),
                drop_reason=None if row.drop_reason is None else DropReason(row.drop_reason),
            )
    return [
        found.get(wanted) or Receipt(rollout_id=wanted, state=ReceiptState.DROPPED, drop_reason=DropReason.INVALID)
        for wanted in asked
    ]


def _possible_key(asked: str) -> tuple[int, int] | None:
    """None for an id that the hub cannot have given: PostgreSQL refuses numbers that do not fit their columns."""
    lease_id, index = key_of(asked)
    given = lease_id < 2**63 and index < MAX_GROUP_SIZE and rollout_id(lease_id, index) == asked
    return (lease_id, index) if given else None
