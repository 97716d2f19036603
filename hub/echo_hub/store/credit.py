"""Credit for work that counted: of each node, each team and the whole run.

A rollout counts when it is trained on, evaluated or delivered to a tenant; the transaction that records this also adds
the credit. The node that held the lease gets credit for the rollout. The nodes that sampled its tokens get credit for
the tokens: these nodes differ if another node resumed the rollout. Work of a team's node is also credited to the team,
permanently. Nothing else gives credit, and nodes cannot claim any. Only sums are stored, so an update costs the same at
the first rollout as at the millionth, and no page counts receipts.

A *holder* is the name of a row: a node's id, a team as "/team/12", or the run as "/run".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal

from sqlalchemy import Connection, Table, bindparam, select, update

from echo_hub.store.bulk import among, execute_many
from echo_hub.store.recent_average import added
from echo_hub.store.streaks import day_of, longer
from echo_hub.store.tables import credit, credit_days, credit_steps, team_members
from echo_hub.store.tallies import add_to, dialect_of

Kind = Literal["node", "team", "run"]
RUN: Final = "/run"
_TEAM: Final = "/team/"
KEYS_A_QUERY: Final = 500
"""Number of keys looked up in one query. Such a query takes a few milliseconds."""


def team_holder(team_id: int) -> str:
    return f"{_TEAM}{team_id}"


def kind_of(holder: str) -> Kind:
    return "run" if holder == RUN else "team" if holder.startswith(_TEAM) else "node"


def grant(connection: Connection, earned: Mapping[str, Mapping[str, int]], *, at: float, step: int | None) -> None:
    """Add credit that was earned at time `at`.

    `earned` maps node ids to "rollouts" and "tokens". `step` is the step that trained on the rollouts; None for
    evaluations and tenants' samples.
    """
    by_holder = _with_teams(connection, {node_id: Counter(part) for node_id, part in earned.items()})
    by_holder = {holder: part for holder, part in by_holder.items() if part["rollouts"] or part["tokens"]}
    if not by_holder:
        return
    day = day_of(at)
    of_before = frozenset() if step is None else _holders_of(connection, step, by_holder)
    rows = _rows(connection, sorted(by_holder))
    if fresh := sorted(by_holder.keys() - rows.keys()):
        ensure(connection, fresh)
        rows |= _rows(connection, fresh)
    changed: list[dict[str, Any]] = []
    for holder, part in by_holder.items():
        row = rows[holder]
        streak = longer(row["streak_days"], row["last_day"], day)
        changed.append(
            {
                "of": holder,
                "new_rollouts": row["rollouts"] + part["rollouts"],
                "new_tokens": row["tokens"] + part["tokens"],
                "new_steps": row["steps"] + (step is not None and holder not in of_before),
                "new_recent": added(row["recent"], part["tokens"], at),
                "new_streak_days": streak,
                "new_longest_streak": max(streak, row["longest_streak"]),
                "new_first_day": day if row["first_day"] is None else row["first_day"],
                # If the clock was set back, `day` is before `last_day`: then the streak stays as it is.
                "new_last_day": day if row["last_day"] is None else max(day, row["last_day"]),
            }
        )
    execute_many(connection, _CHANGE, changed)
    _add_parts(connection, credit_days, "day", day, by_holder)
    if step is not None:
        _add_parts(connection, credit_steps, "step", step, by_holder)


def _holders_of(connection: Connection, step: int, holders: Collection[str]) -> frozenset[str]:
    """Return those `holders` that already have credit for this step. A large step is credited in parts, but counts as
    one step for each holder.
    """
    of_step = select(credit_steps.c.holder).where(credit_steps.c.step == step)
    return frozenset(
        holder
        for part in in_parts(sorted(holders))
        for holder in connection.scalars(of_step.where(among(connection, credit_steps.c.holder, part)))
    )


def _with_teams(connection: Connection, earned: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    team_of = teams_of(connection, earned)
    found: dict[str, Counter[str]] = {RUN: Counter(), **earned}
    for node_id, part in earned.items():
        found[RUN].update(part)
        if node_id in team_of:
            found.setdefault(team_holder(team_of[node_id]), Counter()).update(part)
    return found


def teams_of(connection: Connection, node_ids: Iterable[str]) -> dict[str, int]:
    """Return the present team of each node; nodes without a team are left out."""
    of_these = select(team_members.c.node_id, team_members.c.team_id)
    return {
        row.node_id: row.team_id
        for part in in_parts(sorted(node_ids))
        for row in connection.execute(of_these.where(among(connection, team_members.c.node_id, part)))
    }


def _rows(connection: Connection, holders: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {
        row["holder"]: dict(row)
        for part in in_parts(holders)
        for row in connection.execute(select(credit).where(among(connection, credit.c.holder, part))).mappings()
    }


def _empty(holder: str) -> dict[str, Any]:
    counted = ("rollouts", "tokens", "steps", "streak_days", "longest_streak", "elsewhere_rollouts", "elsewhere_tokens")
    unknown = ("recent", "first_day", "last_day")
    return {"holder": holder, "kind": kind_of(holder), **dict.fromkeys(counted, 0), **dict.fromkeys(unknown)}


def ensure(connection: Connection, holders: Collection[str]) -> None:
    """Insert an empty row for each holder that has none. Safe if another process inserts the same rows at the same
    time.
    """
    execute_many(connection, _ensuring(dialect_of(connection)), [_empty(holder) for holder in holders])


@cache
def _ensuring(dialect: Any) -> Any:
    return dialect.insert(credit).on_conflict_do_nothing(index_elements=["holder"])


# Columns with credit of this run. The remaining two columns hold credit from other runs; `echo-hub credit import`
# writes them.
_OWN: Final = ("rollouts", "tokens", "steps", "recent", "streak_days", "longest_streak", "first_day", "last_day")
_CHANGE: Final = (
    update(credit)
    .where(credit.c.holder == bindparam("of"))
    .values({credit.c[name]: bindparam(f"new_{name}") for name in _OWN})
)


def _add_parts(
    connection: Connection, table: Table, name: str, number: int, by_holder: Mapping[str, Mapping[str, int]]
) -> None:
    """Add credit to each holder's row for one day or one step. `name` is the row's key column, `number` the day or
    step.
    """
    keys: list[dict[str, str | int]] = [{"holder": holder, name: number} for holder in by_holder]
    added = [{"rollouts": part["rollouts"], "tokens": part["tokens"]} for part in by_holder.values()]
    add_to(connection, table, keys, added)


def in_parts(keys: Sequence[str]) -> Iterable[Sequence[str]]:
    return (keys[start : start + KEYS_A_QUERY] for start in range(0, len(keys), KEYS_A_QUERY))
