"""Search rollouts by their properties for an operator, newest leases first. Reads only.

Of the search's conditions, the one that matches the fewest rollouts is looked up in an index ordered by lease. The
other conditions are tested on at most `LOOKED_AT` rollouts from that index. So the search time stays constant as the
run grows, but a page may have few rows or none. The next search continues at `Found.before`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

from sqlalchemy import ColumnElement, Connection, Select, TextClause, select, tuple_

from echo_hub.core.answer_groups import is_answer
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.store.bulk import among
from echo_hub.store.payload_rows import NAMES, payload_of
from echo_hub.store.reading import in_parts
from echo_hub.store.retired import read_last
from echo_hub.store.tables import IS_CHECKED, groups, kept, nodes, payloads, rollouts, steps, versions
from echo_shared.records.rollout import GroupRecord, RolloutFilter, RolloutPayload, RolloutSummary
from echo_shared.wire.messages import Checked, rollout_id

LOOKED_AT: Final = 20_000
"""Largest number of rollouts that one search reads from the index and tests."""
LOOKED_BACK: Final = 2_000
"""For a node's page: number of the node's newest rollouts in which checked rollouts are searched."""
NEWEST: Final = (2**62, 0)
"""A (lease, index) above all stored rollouts. A search that begins before this key finds the newest rollout first."""

Key = tuple[int, int]
"""Lease number and index, which identify a rollout."""

_STORED: Final = tuple(each.name for each in fields(RolloutSummary) if each.name in rollouts.c and each.name != "index")
"""`RolloutSummary` fields with an equally named column in `rollouts`."""
_COLUMNS: Final = (
    rollouts.c.lease_id,
    rollouts.c.index.label("at"),
    rollouts.c.turn_reward,
    *(rollouts.c[name] for name in _STORED),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One page of a search for rollouts."""

    rollouts: tuple[RolloutSummary, ...]
    before: Key | None
    """Key of the last rollout that was tested. The next search continues before this key. None if no older rollouts are
    left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup(GroupRecord):
    """A group, with all rollouts ever leased for it, ordered by index, turn and lease."""

    rollouts: tuple[RolloutSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReward:
    """The reward of one episode in a step's batch, with facts about the episode's last turn."""

    rollout_id: str
    group_id: int
    index: int
    reward: float
    num_tokens: int
    """Number of sampled tokens in the episode's last turn."""
    turn_rewards: tuple[float, ...]
    """The parts of `reward` that the turns before the last one earned, in order. The last turn earned the rest."""
    policy_version: int
    """Policy version for which the last turn was leased."""


@dataclass(frozen=True, slots=True)
class _Within:
    """A condition on a column: at least `low`, at most `high`; None means no bound."""

    column: str
    low: float | str | None
    high: float | str | None

    def on(self, columns: Any) -> ColumnElement[bool]:
        column: ColumnElement[Any] = columns[self.column]
        if self.low == self.high:
            return column == self.low
        if self.low is None:
            return column <= self.high
        return column >= self.low if self.high is None else column.between(self.low, self.high)


def find_rollouts(connection: Connection, wanted: RolloutFilter, before: Key, limit: int) -> Found:
    """Return at most `limit` matching rollouts before the key `before`, newest first. Ignores the filter's `text`."""
    looked_up, tried = _conditions(connection, wanted)
    by_index = _before(looked_up, before)
    if not tried:
        rows = connection.execute(by_index.limit(limit + 1)).all()
    else:
        candidates = by_index.limit(LOOKED_AT).subquery()
        order = (candidates.c.lease_id.desc(), candidates.c["at"].desc())
        matching = select(candidates).where(*(condition.on(candidates.c) for condition in tried)).order_by(*order)
        rows = connection.execute(matching.limit(limit + 1)).all()
    last = None
    if len(rows) > limit:
        last = rows[limit - 1]
    elif tried:
        last = connection.execute(by_index.offset(LOOKED_AT - 1).limit(1)).one_or_none()
    found = _summaries(connection, rows[:limit])
    return Found(rollouts=found, before=None if last is None else (last.lease_id, last.at))


def newest_of_node(
    connection: Connection, node_id: str, limit: int
) -> tuple[tuple[RolloutSummary, ...], tuple[RolloutSummary, ...]]:
    """Return a node's newest rollouts, and the checked ones among its `LOOKED_BACK` newest: at most `limit` each."""
    candidates = _before([rollouts.c.node_id == node_id], NEWEST).limit(LOOKED_BACK)
    newest = connection.execute(candidates.limit(limit)).all()
    of_node = candidates.subquery()
    order = (of_node.c.lease_id.desc(), of_node.c["at"].desc())
    were_checked = select(of_node).where(of_node.c.checked != Checked.NO).order_by(*order).limit(limit)
    return _summaries(connection, newest), _summaries(connection, connection.execute(were_checked).all())


def read_tokens(connection: Connection, keys: Collection[Key]) -> dict[Key, RolloutPayload]:
    """Return the stored tokens of these rollouts, from `payloads` or, once the hub no longer needs them, from
    `kept`.
    """
    wanted = set(keys)
    found: dict[Key, RolloutPayload] = {}
    for table in (payloads, kept):
        query = select(*(table.c[name] for name in NAMES), table.c.lease_id, table.c.index.label("at"))
        for part in in_parts(sorted({lease_id for lease_id, _ in wanted})):
            # Query by lease alone: for (lease, index) pairs, SQLite would scan the whole table.
            for row in connection.execute(query.where(table.c.lease_id.in_(part))):
                if (row.lease_id, row.at) in wanted:
                    found[row.lease_id, row.at] = payload_of(row)
    return found


def read_group(connection: Connection, group_id: int) -> StoredGroup | None:
    """Return a group with all its rollouts; None if no rollout of the group was ever leased."""
    rows = connection.execute(
        select(*_COLUMNS)
        .where(rollouts.c.group_id == group_id)
        .order_by(rollouts.c.index, rollouts.c.turn, rollouts.c.lease_id)
    ).all()
    group = connection.execute(select(groups).where(groups.c.group_id == group_id)).one_or_none()
    is_retired = group is not None and _is_retired(connection, group)
    if not rows and not is_retired:
        return None
    step = None if group is None or group.step is None else _step(connection, group.step)
    published_at = None
    if step is not None:
        of_step = select(versions.c.published_at).where(versions.c.policy_version == step.step)
        published_at = connection.scalar(of_step)
    return StoredGroup(
        group_id=group_id,
        opened_at=None if group is None else group.opened_at,
        step=None if group is None else group.step,
        drop_reason=None if group is None else group.drop_reason,
        rollouts=_summaries(connection, rows),
        staleness=None if step is None else dict(zip(step.group_ids, step.staleness, strict=True))[group_id],
        planned_at=None if step is None else step.planned_at,
        trained_at=None if step is None else step.trained_at,
        published_at=published_at,
        retired=is_retired,
    )


def _is_retired(connection: Connection, group: Any) -> bool:
    last = read_last(connection)
    if last is None:
        return False
    if group.step is None:
        return group.drop_reason is not None and group.group_id <= last.through.group
    return bool(group.step <= last.through.step)


def summaries_of_groups(connection: Connection, group_ids: Collection[int]) -> tuple[RolloutSummary, ...]:
    """Return all rollouts of these groups, ordered by group, index, turn and lease."""
    in_order = (rollouts.c.group_id, rollouts.c.index, rollouts.c.turn, rollouts.c.lease_id)
    wanted = select(*_COLUMNS).where(among(connection, rollouts.c.group_id, group_ids)).order_by(*in_order)
    return _summaries(connection, connection.execute(wanted).all())


def read_batch_rewards(connection: Connection, step: int) -> list[BatchReward]:
    """Return the last turn of each episode in a step's batch, ordered by group and index."""
    batch = _step(connection, step)
    if batch is None:
        return []
    in_batch = set(batch.rollout_ids)
    query = select(*_COLUMNS).order_by(rollouts.c.group_id, rollouts.c.index, rollouts.c.turn)
    found, earned = [], list[float]()
    for part in in_parts(batch.group_ids):
        for row in connection.execute(query.where(rollouts.c.group_id.in_(part))):
            name = rollout_id(row.lease_id, row.at)
            if name not in in_batch:
                continue
            earned = [*(earned if row.turn else ()), row.turn_reward or 0.0]
            if row.reward is not None:
                found.append(
                    BatchReward(
                        rollout_id=name,
                        group_id=row.group_id,
                        index=row.at,
                        reward=row.reward,
                        num_tokens=row.num_tokens,
                        turn_rewards=tuple(earned[:-1]),
                        policy_version=row.policy_version,
                    )
                )
    return found


def _step(connection: Connection, step: int) -> Any | None:
    return connection.execute(select(steps).where(steps.c.step == step)).one_or_none()


def _conditions(
    connection: Connection, wanted: RolloutFilter
) -> tuple[list[ColumnElement[bool] | TextClause], list[_Within]]:
    """Split a filter into exact conditions for the index lookup, and conditions to test on the rows that the lookup
    finds.
    """
    equal = {
        "group_id": wanted.group,
        "checked": wanted.check if wanted.check != Checked.NO else None,
        "drop_reason": wanted.drop,
        "node_id": wanted.node,
        "policy_version": wanted.version,
    }
    tried = [_Within(name, value, value) for name, value in equal.items() if value not in (None, "")]
    looked_up: list[ColumnElement[bool] | TextClause] = []
    if wanted.step is not None:
        batch = _step(connection, wanted.step)
        looked_up.append(rollouts.c.group_id.in_([] if batch is None else batch.group_ids))
    elif tried:
        first = tried.pop(0)
        looked_up.append(first.on(rollouts.c))
        looked_up += [IS_CHECKED] if first.column == "checked" else []
    tried += [_Within("state", wanted.state, wanted.state)] if wanted.state else []
    tried += [_Within("checked", Checked.NO, Checked.NO)] if wanted.check == Checked.NO else []
    for name, low, high in (
        ("reward", wanted.reward_min, wanted.reward_max),
        ("num_tokens", wanted.tokens_min, wanted.tokens_max),
    ):
        if low is not None or high is not None:
            tried.append(_Within(name, low, high))
    return looked_up, tried


def _before(conditions: Collection[ColumnElement[bool] | TextClause], before: Key) -> Select[Any]:
    place = tuple_(rollouts.c.lease_id, rollouts.c.index)
    newest_first = (rollouts.c.lease_id.desc(), rollouts.c.index.desc())
    return select(*_COLUMNS).where(*conditions, place < before).order_by(*newest_first)


def _summaries(connection: Connection, rows: Sequence[Any]) -> tuple[RolloutSummary, ...]:
    of_groups, of_nodes = select(groups.c.group_id, groups.c.step), select(nodes.c.node_id, nodes.c.name)
    step_of = {
        row.group_id: row.step
        for part in in_parts(sorted({row.group_id for row in rows}))
        for row in connection.execute(of_groups.where(groups.c.group_id.in_(part)))
    }
    name_of = {
        row.node_id: row.name
        for part in in_parts(sorted({row.node_id for row in rows}))
        for row in connection.execute(of_nodes.where(nodes.c.node_id.in_(part)))
    }
    return tuple(_summary(row, step_of.get(row.group_id), name_of.get(row.node_id, row.node_id)) for row in rows)


class HeldOutSet(Protocol):
    """The attributes of a held-out set that this module needs. `echo_hub.config.task_sections.ChosenSet` implements
    them."""

    @property
    def name(self) -> str: ...

    @property
    def numbers(self) -> range:
        """Positions of this set's problems in the common list of all sets' problems."""


def _summary(row: Any, step: int | None, node_name: str) -> RolloutSummary:
    stored = {name: getattr(row, name) for name in _STORED}
    return RolloutSummary(
        **{**stored, "detail": row.detail or "", "not_kept": row.not_kept or ""},
        rollout_id=rollout_id(row.lease_id, row.at),
        index=row.at,
        step=step,
        evaluation=evaluation_text(row.group_id),
        node_name=node_name,
    )


def evaluation_text(group_id: int, sets: Sequence[HeldOutSet] = ()) -> str:
    """Describe the evaluation to which a group belongs; "" for a training group. `sets` are the run's held-out sets.
    Tenants' requests are named too.
    """
    if is_answer(group_id):
        return "a tenant's request"
    about = EvaluationGroup.of(group_id)
    if about is None:
        return ""
    how = "greedy" if about.greedy else "sampled"
    for one in sets:
        if about.number in one.numbers:
            return f"{one.name}{' ' if one.name else ''}held-out problem {one.numbers.index(about.number)}, {how}"
    return f"held-out problem {about.number}, {how}"
