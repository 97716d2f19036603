"""Invites, and the nodes that joined with them, in the store."""

from __future__ import annotations

from dataclasses import asdict

from sqlalchemy import Connection, func, insert, select, update

from echo_hub.store.known_nodes import ban_nodes
from echo_hub.store.tables import invites, nodes
from echo_shared.records.run import Invite


def add_invite(connection: Connection, invite: Invite) -> bool:
    """Add an invite; the database assigns its number.

    Return False, and add nothing, if a valid invite has this name.
    """
    of_name = select(invites.c.invite_id).where(invites.c.name == invite.name, invites.c.revoked_at.is_(None))
    if connection.execute(of_name).first() is not None:
        return False
    values = asdict(invite)
    del values["invite_id"]
    connection.execute(insert(invites), values)
    return True


def read_invites(connection: Connection) -> list[Invite]:
    rows = connection.execute(select(invites).order_by(invites.c.invite_id))
    return [Invite(**row) for row in rows.mappings()]


def read_num_invites(connection: Connection) -> tuple[int, int]:
    """Return how many invites were made and how many were revoked. Every change of invites changes one of these
    numbers, so caches compare them.
    """
    made, revoked = connection.execute(
        select(func.count(), func.count(invites.c.revoked_at)).select_from(invites)
    ).one()
    return made, revoked


def revoke_invite(connection: Connection, name: str, now: float, *, ban: bool = False) -> list[str]:
    """Revoke all invites of this name, and return the nodes that joined with them. With `ban`, ban these nodes too."""
    of_name = invites.c.name == name
    connection.execute(update(invites).where(of_name, invites.c.revoked_at.is_(None)).values(revoked_at=now))
    came = nodes_of(connection, name)
    if ban:
        ban_nodes(connection, came, now)
    return came


def read_came_by(connection: Connection) -> dict[str, int]:
    """Return the invite number of each invited node, in the order in which the nodes first joined."""
    invited = select(nodes.c.node_id, nodes.c.invite_id).where(nodes.c.invite_id.is_not(None))
    rows = connection.execute(invited.order_by(nodes.c.first_seen, nodes.c.node_id))
    return {row.node_id: row.invite_id for row in rows}


def nodes_of(connection: Connection, name: str) -> list[str]:
    of_name = select(invites.c.invite_id).where(invites.c.name == name)
    return list(connection.scalars(select(nodes.c.node_id).where(nodes.c.invite_id.in_(of_name))))
