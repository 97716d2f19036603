"""Nodes that have joined: times at which they were last seen, bans, and names of nodes with credited work."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from sqlalchemy import Connection, select, update

from echo_hub.store.bulk import among
from echo_hub.store.tables import nodes
from echo_hub.store.tallies import read_useful_nodes
from echo_shared.records.run import CountedName

SEEN_A_STATEMENT: Final = 64


def note_still_here(connection: Connection, node_ids: Sequence[str], now: float) -> None:
    """Set the time at which these connected nodes were last seen to `now`."""
    for start in range(0, len(node_ids), SEEN_A_STATEMENT):
        part = among(connection, nodes.c.node_id, node_ids[start : start + SEEN_A_STATEMENT])
        connection.execute(update(nodes).where(part).values(last_seen=now))


def ban_nodes(connection: Connection, node_ids: Collection[str], now: float) -> None:
    """Ban these nodes. A node that is already banned keeps the time of its first ban."""
    of_these = nodes.c.node_id.in_(node_ids)
    connection.execute(update(nodes).where(of_these, nodes.c.banned_at.is_(None)).values(banned_at=now))


def unban_nodes(connection: Connection, node_ids: Collection[str]) -> None:
    connection.execute(update(nodes).where(nodes.c.node_id.in_(node_ids)).values(banned_at=None))


def read_banned_nodes(connection: Connection) -> frozenset[str]:
    return frozenset(connection.scalars(select(nodes.c.node_id).where(nodes.c.banned_at.is_not(None))))


def read_counted_names(connection: Connection) -> list[CountedName]:
    """Return the names of nodes with credited tokens, in the order in which the nodes were first seen."""
    useful = read_useful_nodes(connection)
    every = select(nodes.c.node_id, nodes.c.name, nodes.c.invite_id)
    found = connection.execute(every.order_by(nodes.c.first_seen, nodes.c.node_id))
    return [CountedName(*row) for row in found if row.node_id in useful]
