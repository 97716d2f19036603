"""The snapshot from which the coordinator continues when the hub starts: all unfinished work, and the next free
numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, exists, func, select

from echo_hub.core.accounting.snapshot import RECENT_STEPS, CoordinatorSnapshot, GroupRow, StepRow, UnfinishedRollout
from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID, EvaluationGroup, evaluation_ids
from echo_hub.core.policy.curriculum import REMEMBERED, GroupResult
from echo_hub.store import old_receipts
from echo_hub.store.answers import read_open_answers
from echo_hub.store.beginnings import read_beginning
from echo_hub.store.bulk import among
from echo_hub.store.reading import in_parts, scorer_failures
from echo_hub.store.sessions import read_evaluations_losses, read_session_losses
from echo_hub.store.standings import read_coarse_classes, read_standings
from echo_hub.store.tables import (
    IS_OPEN,
    IS_UNFINISHED,
    WITH_PAYLOAD,
    evaluations,
    groups,
    payloads,
    rollouts,
    steps,
    versions,
)
from echo_shared.records.rollout import unpack_spans
from echo_shared.wire.messages import Checked, DropReason, ReceiptState, rollout_id


def read_snapshot(connection: Connection) -> CoordinatorSnapshot:
    beginning = read_beginning(connection)
    newest_trained = connection.scalar(select(func.max(steps.c.step)).where(steps.c.trained_at.is_not(None)))
    trained = beginning.policy_version if newest_trained is None else newest_trained
    planned = connection.execute(
        select(steps.c.step, steps.c.group_ids, steps.c.rollout_ids)
        .where(steps.c.step > trained)
        .order_by(steps.c.step)
    ).all()
    open_groups = _open_groups(connection, [group_id for row in planned for group_id in row.group_ids])
    kept = connection.scalars(select(steps.c.step).where(steps.c.trained_at.is_not(None), steps.c.pruned.is_(False)))
    # Groups with ids above the newest planned group are in no step yet. Such groups wait for a step, or were dropped
    # after that group was planned.
    newest_first = select(groups.c.group_id).where(groups.c.step.is_not(None)).order_by(groups.c.group_id.desc())
    newest_planned = -1 if (newest := connection.scalar(newest_first.limit(1))) is None else newest
    flat_groups = connection.scalars(
        select(groups.c.group_id)
        .where(groups.c.drop_reason == DropReason.NO_ADVANTAGE)
        .where(groups.c.group_id > newest_planned)
        .order_by(groups.c.group_id)
    )
    batch_sizes = connection.scalars(select(steps.c.num_groups).order_by(steps.c.step.desc()).limit(RECENT_STEPS)).all()
    newest_group = connection.scalar(select(func.max(groups.c.group_id)))
    of_open = read_session_losses(connection, [row.group_id for row in open_groups])
    answer_groups, answered = read_open_answers(connection)
    newest_lease = connection.scalar(select(func.max(rollouts.c.lease_id)))
    return CoordinatorSnapshot(
        next_group_id=beginning.group_id if newest_group is None else newest_group + 1,
        next_lease_id=max(newest_lease or 0, old_receipts.newest_lease(connection)) + 1,
        groups=tuple(GroupRow(group_id=row.group_id, seed=row.seed, prompt=row.prompt) for row in open_groups),
        rollouts=_unfinished(connection),
        scorer_failures=scorer_failures(connection, [row.group_id for row in open_groups]),
        sessions=of_open + read_evaluations_losses(connection),
        newest_planned_group=newest_planned,
        flat_groups=tuple(flat_groups),
        results=_results(connection, newest_planned),
        trained_steps=trained,
        planned=tuple(
            StepRow(step=row.step, group_ids=tuple(row.group_ids), rollout_ids=tuple(row.rollout_ids))
            for row in planned
        ),
        batch_sizes=tuple(reversed(batch_sizes)),
        published_version=connection.scalar(select(func.max(versions.c.policy_version))) or 0,
        replayable=frozenset(kept),
        evaluated=_evaluated(connection),
        answers=answer_groups,
        answered=answered,
        standings=read_standings(connection),
        coarse_classes=read_coarse_classes(connection),
    )


def _open_groups(connection: Connection, planned: Sequence[int]) -> list[Any]:
    """Return the open groups and the groups of planned steps. Dropped groups are left out."""
    columns = select(groups.c.group_id, groups.c.seed, groups.c.prompt)
    found = [*connection.execute(columns.where(IS_OPEN))]
    for part in in_parts(planned):
        found += connection.execute(
            columns.where(among(connection, groups.c.group_id, part), groups.c.drop_reason.is_(None))
        )
    return sorted(found, key=lambda row: row.group_id)


def _results(connection: Connection, newest_planned: int) -> tuple[GroupResult, ...]:
    """Return pass rates of groups: of all groups after the newest planned group, and of the newest `REMEMBERED` groups
    up to it.
    """
    rated = select(groups.c.group_id, groups.c.prompt, groups.c.pass_rate).where(groups.c.pass_rate.is_not(None))
    newest_first = rated.order_by(groups.c.group_id.desc())
    uncounted = connection.execute(newest_first.where(groups.c.group_id > newest_planned)).all()
    counted = connection.execute(newest_first.where(groups.c.group_id <= newest_planned).limit(REMEMBERED)).all()
    return tuple(
        GroupResult(group_id=row.group_id, prompt=row.prompt, pass_rate=row.pass_rate)
        for row in reversed([*uncounted, *counted])
    )


def _evaluated(connection: Connection) -> frozenset[tuple[int, int]]:
    """Return the finished episodes, as (group, index), of versions whose evaluation result is not recorded yet.

    The search walks along the index of groups from version to version, so it skips the rollouts of recorded
    evaluations.
    """
    recorded = select(evaluations.c.policy_version).limit(1)
    found: set[tuple[int, int]] = set()
    next_id = FIRST_EVALUATION_ID
    while True:
        first = select(rollouts.c.group_id).where(rollouts.c.group_id >= next_id).order_by(rollouts.c.group_id)
        about = EvaluationGroup.of(connection.scalar(first.limit(1)) or 0)
        if about is None:
            return frozenset(found)
        ids = evaluation_ids(about.policy_version)
        if connection.scalar(recorded.where(evaluations.c.policy_version == about.policy_version)) is None:
            ended = select(rollouts.c.group_id, rollouts.c.index).where(
                rollouts.c.group_id.between(ids[0], ids[-1]), rollouts.c.state == ReceiptState.EVALUATED
            )
            found.update((group_id, index) for group_id, index in connection.execute(ended))
        next_id = ids[-1] + 1


def _unfinished(connection: Connection) -> tuple[UnfinishedRollout, ...]:
    before = rollouts.alias()
    others_held = exists().where(
        before.c.group_id == rollouts.c.group_id,
        before.c.index == rollouts.c.index,
        before.c.turn == rollouts.c.turn,
        before.c.lease_id < rollouts.c.lease_id,
        before.c.node_id != rollouts.c.node_id,
    )
    rows = connection.execute(
        select(
            rollouts.c.lease_id,
            rollouts.c.index.label("at"),
            rollouts.c.node_id,
            rollouts.c.group_id,
            rollouts.c.turn,
            rollouts.c.policy_version,
            rollouts.c.deadline,
            rollouts.c.state,
            rollouts.c.num_tokens,
            rollouts.c.reward,
            rollouts.c.turn_reward,
            rollouts.c.checked,
            payloads.c.spans,
            others_held.label("others_held"),
        )
        .join_from(rollouts, payloads, WITH_PAYLOAD, isouter=True)
        .where(IS_UNFINISHED)
        .order_by(rollouts.c.lease_id, rollouts.c.index)
    )
    return tuple(
        UnfinishedRollout(
            rollout_id=rollout_id(row.lease_id, row.at),
            lease_id=row.lease_id,
            node_id=row.node_id,
            group_id=row.group_id,
            index=row.at,
            turn=row.turn,
            policy_version=row.policy_version,
            deadline=row.deadline,
            state=ReceiptState(row.state),
            num_tokens=row.num_tokens or 0,
            reward=row.reward,
            turn_reward=row.turn_reward or 0.0,
            oldest_version=unpack_spans(row.spans)[0].policy_version if row.spans else None,
            drawn_by=_others(row),
            others_held=row.others_held,
            checked=Checked(row.checked),
        )
        for row in rows
    )


def _others(row: Any) -> tuple[str, ...]:
    """Return the nodes that sampled tokens of the rollout, without the node that holds its lease."""
    drawers = dict.fromkeys(span.node_id for span in unpack_spans(row.spans or ()))
    return tuple(name for name in drawers if name != row.node_id)
