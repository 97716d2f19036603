"""Owners of nodes: which nodes belong to an owner, and which owners the leaderboard shows as one entry.

The table `owners` has a row for each owner with one entry. The leaderboard sums up the credit of that owner's present
nodes when it is read (`echo_hub.store.board`), so nothing has to be counted again when nodes come or go.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, insert, select

from echo_hub.store.tables import credit, nodes, owners
from echo_shared.wire.messages import MAX_FLEET


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedNode:
    """One of an owner's nodes. `claim` is the owner's signature; `tokens` counts the tokens of its credited
    `rollouts`.
    """

    node_id: str
    node_key: bytes
    claim: bytes
    name: str
    last_seen: float
    rollouts: int
    tokens: int


def read_is_owned(connection: Connection, node_id: str, owner_key: str) -> bool:
    """Return True if the node belonged to this owner when it last joined."""
    found = select(nodes.c.node_id).where(nodes.c.node_id == node_id, nodes.c.owner_key == owner_key)
    return connection.execute(found).first() is not None


def read_owned(connection: Connection, owner_key: str) -> tuple[OwnedNode, ...]:
    """Return the owner's nodes, those that were seen last first, at most `MAX_FLEET`."""
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


def read_owned_ids(connection: Connection, owner_key: str) -> frozenset[str]:
    """Return the ids of all of the owner's nodes."""
    return frozenset(connection.scalars(select(nodes.c.node_id).where(nodes.c.owner_key == owner_key)))


def read_counts_once(connection: Connection, owner_key: str) -> bool:
    return connection.execute(select(owners.c.owner_key).where(owners.c.owner_key == owner_key)).first() is not None


def set_counts_once(connection: Connection, owner_key: str, *, counts_once: bool) -> None:
    """Show all nodes of an owner as one leaderboard entry, or again each node separately."""
    if counts_once and not read_counts_once(connection, owner_key):
        connection.execute(insert(owners), {"owner_key": owner_key})
    elif not counts_once:
        connection.execute(delete(owners).where(owners.c.owner_key == owner_key))


def leave_owner(connection: Connection, node_id: str, owner_key: str) -> None:
    """Forget the node's former owner, if it has no other node and is not `owner_key` ("" = no owner): otherwise nodes
    that change their owner often would fill the table. Call it before the node's row is written.
    """
    before = connection.scalar(select(nodes.c.owner_key).where(nodes.c.node_id == node_id))
    if before is None or before == owner_key:
        return
    others = select(nodes.c.node_id).where(nodes.c.owner_key == before, nodes.c.node_id != node_id).limit(1)
    if connection.execute(others).first() is None:
        connection.execute(delete(owners).where(owners.c.owner_key == before))
