"""Read a whole run in the order of its groups, part by part, for a bundle that anyone can check."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, func, select

from echo_hub.core.answer_groups import FIRST_ANSWER_ID
from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID
from echo_hub.store.bulk import among
from echo_hub.store.tables import groups, nodes, rollouts, steps, trust


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroupFacts:
    """One training group. `step` is None if no step has trained on it."""

    group_id: int
    seed: int
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStepFacts:
    """One trained step. `metrics` are those that the learner measured."""

    step: int
    num_groups: int
    num_rollouts: int
    num_tokens: int
    mean_reward: float
    staleness: int
    """Greatest staleness of the batch's groups, in steps."""
    planned_at: float
    trained_at: float
    metrics: dict[str, float]


def read_groups_after(connection: Connection, after: int, limit: int) -> list[StoredGroupFacts]:
    """Return the next training groups by id, at most `limit`."""
    columns = (groups.c.group_id, groups.c.seed, groups.c.step)
    rows = connection.execute(
        select(*columns).where(groups.c.group_id > after).order_by(groups.c.group_id).limit(limit)
    )
    return [StoredGroupFacts(group_id=row.group_id, seed=row.seed, step=row.step) for row in rows]


def read_evaluation_groups_after(connection: Connection, after: int, limit: int) -> list[int]:
    """Return the ids of the next evaluation groups that have rollouts, at most `limit`.

    Evaluation groups have no rows of their own, so their ids come from the index of rollouts by group.
    """
    found: list[int] = []
    at = max(after, FIRST_EVALUATION_ID - 1)
    lowest = select(func.min(rollouts.c.group_id)).where(rollouts.c.group_id < FIRST_ANSWER_ID)
    while len(found) < limit:
        following = connection.scalar(lowest.where(rollouts.c.group_id > at))
        if following is None:
            break
        found.append(following)
        at = following
    return found


_LEASES: Final = (
    rollouts.c.lease_id,
    rollouts.c.index.label("at"),
    *(
        rollouts.c[name]
        for name in (
            *("node_id", "group_id", "turn", "policy_version", "state", "drop_reason", "reward", "turn_reward"),
            *("num_tokens", "checked"),
        )
    ),
)


def read_leases_of_groups(connection: Connection, group_ids: Collection[int]) -> Sequence[Any]:
    """Return the rows of all rollouts of these groups, ordered by group, index, turn and lease."""
    in_order = (rollouts.c.group_id, rollouts.c.index, rollouts.c.turn, rollouts.c.lease_id)
    return connection.execute(
        select(*_LEASES).where(among(connection, rollouts.c.group_id, group_ids)).order_by(*in_order)
    ).all()


def read_batch_ids(connection: Connection, step: int) -> list[str]:
    """Return the rollout ids of a step's batch in training order; empty for a step that was never planned."""
    return connection.scalar(select(steps.c.rollout_ids).where(steps.c.step == step)) or []


def read_step_facts(connection: Connection, after: int, limit: int) -> list[StoredStepFacts]:
    """Return the next trained steps, at most `limit`."""
    rows = connection.execute(
        select(
            steps.c.step,
            steps.c.num_groups,
            steps.c.num_rollouts,
            steps.c.num_tokens,
            steps.c.mean_reward,
            steps.c.staleness,
            steps.c.planned_at,
            steps.c.trained_at,
            steps.c.metrics,
        )
        .where(steps.c.step > after, steps.c.trained_at.is_not(None))
        .order_by(steps.c.step)
        .limit(limit)
    )
    return [
        StoredStepFacts(
            step=row.step,
            num_groups=row.num_groups,
            num_rollouts=row.num_rollouts,
            num_tokens=row.num_tokens,
            mean_reward=row.mean_reward,
            staleness=max(row.staleness, default=0),
            planned_at=row.planned_at,
            trained_at=row.trained_at,
            metrics=row.metrics or {},
        )
        for row in rows
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEngine:
    """The engine that a node last reported: `numerics` holds backend, precision and device, each "" if not reported."""

    node_id: str
    name: str
    numerics: tuple[str, str, str]
    standing: str
    """Trust standing of the node; empty for a node that was never checked."""


def read_engines(connection: Connection, node_ids: Collection[str]) -> list[StoredEngine]:
    """Return the engines of these nodes. Nodes that never joined this run are left out."""
    rows = connection.execute(
        select(nodes.c.node_id, nodes.c.name, nodes.c.backend, trust.c.numerics, trust.c.state)
        .select_from(nodes.outerjoin(trust, trust.c.node_id == nodes.c.node_id))
        .where(among(connection, nodes.c.node_id, node_ids))
        .order_by(nodes.c.node_id)
    )
    return [
        StoredEngine(
            node_id=row.node_id,
            name=row.name,
            numerics=(row.backend, "", "") if row.numerics is None else tuple(row.numerics),
            standing=row.state or "",
        )
        for row in rows
    ]
