"""Owners of nodes: which nodes an owner has, and the credit of owners that the leaderboard shows as one entry.

The table `owners` has a row for each owner that has chosen one entry. Such an owner's credit is the sum over its
present nodes: `credit.grant` adds new work, and `recount_owners` computes the sum again after nodes have joined or left
the owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp2, log2
from typing import Any, Final

from sqlalchemy import Connection, Table, delete, func, insert, literal, or_, select, update

from echo_hub.store.credit import ensure, owner_holder
from echo_hub.store.streaks import longer
from echo_hub.store.tables import MUST_RECOUNT, credit, credit_days, credit_steps, nodes, owners
from echo_shared.wire.messages import MAX_FLEET

RECOUNTED_AT_ONCE: Final = 16
"""Owners whose credit is computed again in one transaction. For each owner, all days and steps of its nodes are
read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedNode:
    """One of an owner's nodes. `claim` is the owner's signature over the node's id and the hub's key. `rollouts` and
    `tokens` are the node's credit.
    """

    node_id: str
    node_key: bytes
    claim: bytes
    name: str
    last_seen: float
    rollouts: int
    tokens: int


def read_owned(connection: Connection, owner_key: str) -> tuple[OwnedNode, ...]:
    """Return the owner's nodes, at most `MAX_FLEET`; those seen last come first."""
    found = (
        select(nodes, func.coalesce(credit.c.rollouts, 0).label("done"), func.coalesce(credit.c.tokens, 0).label("of"))
        .select_from(nodes.outerjoin(credit, credit.c.holder == nodes.c.node_id))
        .where(nodes.c.owner_key == owner_key)
        .order_by(nodes.c.last_seen.desc(), nodes.c.node_id)
        .limit(MAX_FLEET)
    )
    return tuple(
        OwnedNode(
            node_id=row.node_id,
            node_key=bytes.fromhex(row.public_key),
            claim=bytes.fromhex(row.owner_claim),
            name=row.name,
            last_seen=row.last_seen,
            rollouts=row.done,
            tokens=row.of,
        )
        for row in connection.execute(found)
    )


def read_counts_once(connection: Connection, owner_key: str) -> bool:
    return connection.execute(select(owners.c.owner_key).where(owners.c.owner_key == owner_key)).first() is not None


def set_counts_once(connection: Connection, owner_key: str, *, counts_once: bool) -> None:
    """Give an owner one leaderboard entry, or, if `counts_once` is False, give each of its nodes its own entry
    again."""
    if counts_once == read_counts_once(connection, owner_key):
        return
    if counts_once:
        connection.execute(insert(owners), {"owner_key": owner_key, "must_recount": True})
    else:
        connection.execute(delete(owners).where(owners.c.owner_key == owner_key))
        _forget(connection, owner_holder(owner_key))


def note_owner(connection: Connection, node_id: str, owner_key: str) -> None:
    """If the node's owner changes, mark the old and the new owner, so that their credit is computed again. `owner_key`
    is the new owner; "" means none. Call this before the node's row is written.
    """
    before = connection.scalar(select(nodes.c.owner_key).where(nodes.c.node_id == node_id)) or ""
    if before != owner_key:
        changed = or_(owners.c.owner_key == before, owners.c.owner_key == owner_key)
        connection.execute(update(owners).where(changed).values(must_recount=True))


def recount_owners(connection: Connection) -> None:
    """Recompute the credit of owners whose nodes have changed, for at most `RECOUNTED_AT_ONCE` owners."""
    due = select(owners.c.owner_key).where(MUST_RECOUNT).order_by(owners.c.owner_key).limit(RECOUNTED_AT_ONCE)
    for owner_key in connection.scalars(due).all():
        _recount(connection, owner_key)
        connection.execute(update(owners).where(owners.c.owner_key == owner_key).values(must_recount=False))


def _recount(connection: Connection, owner_key: str) -> None:
    holder = owner_holder(owner_key)
    _forget(connection, holder)
    members = select(nodes.c.node_id).where(nodes.c.owner_key == owner_key).scalar_subquery()
    for table, name in ((credit_days, "day"), (credit_steps, "step")):
        _sum_up(connection, table, name, holder, members)
    rows = connection.execute(select(credit).where(credit.c.holder.in_(members))).all()
    days = connection.scalars(select(credit_days.c.day).where(credit_days.c.holder == holder)).all()
    steps = connection.scalar(select(func.count()).where(credit_steps.c.holder == holder)) or 0
    ensure(connection, [holder])
    summed = ("rollouts", "tokens", "elsewhere_rollouts", "elsewhere_tokens")
    values = {name: sum(getattr(row, name) for row in rows) for name in summed}
    values |= {"steps": steps, "recent": _summed([row.recent for row in rows if row.recent is not None])}
    connection.execute(update(credit).where(credit.c.holder == holder).values(values | _streaks(sorted(days))))


def _sum_up(connection: Connection, table: Table, name: str, holder: str, members: Any) -> None:
    """Insert the sums over the nodes `members` for each day or step. `name` is the key column, "day" or "step"."""
    key = table.c[name]
    sums = select(literal(holder), key, func.sum(table.c.rollouts), func.sum(table.c.tokens))
    of_nodes = sums.where(table.c.holder.in_(members)).group_by(key)
    connection.execute(insert(table).from_select(["holder", name, "rollouts", "tokens"], of_nodes))


def _summed(recents: Sequence[float]) -> float | None:
    """Return the stored form of the sum of recent averages; see `echo_hub.store.recent_average`."""
    if not recents:
        return None
    most = max(recents)
    return most + log2(sum(exp2(recent - most) for recent in recents))


def _streaks(days: Sequence[int]) -> dict[str, int | None]:
    """Return the columns of `credit` about streaks. `days` are the days with credit, in ascending order."""
    streak, longest, last = 0, 0, None
    for day in days:
        streak, last = longer(streak, last, day), day
        longest = max(longest, streak)
    first = days[0] if days else None
    return {"streak_days": streak, "longest_streak": longest, "first_day": first, "last_day": last}


def _forget(connection: Connection, holder: str) -> None:
    for table in (credit, credit_days, credit_steps):
        connection.execute(delete(table).where(table.c.holder == holder))
