"""Teams of nodes. A node belongs to at most one team; every team is open to all nodes. The node that makes a team is
its founder.

A node's work counts for the team that the node is in at that moment, and stays with the team when the node leaves
(`echo_hub.store.credit`). If the last node leaves, a team with credit is kept; a team without credit is deleted.
"""

from __future__ import annotations

import unicodedata
from typing import Final, assert_never
from urllib.parse import quote

from sqlalchemy import Connection, delete, func, insert, select

from echo_hub.store.board import read_holder
from echo_hub.store.credit import ensure, team_holder
from echo_hub.store.tables import credit, credit_days, credit_steps, nodes, team_members, teams
from echo_shared.errors import RefusedError
from echo_shared.records.credit import Holder
from echo_shared.wire.messages import Team, TeamWanted
from echo_shared.wire.messages.shown_names import fault_of, looks_of

MOST_TEAMS: Final = 10_000


def name_key(name: str) -> str:
    """Return a team name's key, Unicode's compatibility form without case and extra spaces. Names with equal keys count
    as the same name.
    """
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def change_team(connection: Connection, node_id: str, wanted: TeamWanted, now: float) -> None:
    """Make, join or leave a team, as the node asks. Raises RefusedError."""
    match wanted.action:
        case "create":
            create_team(connection, node_id, wanted.name, now)
        case "join":
            join_team(connection, node_id, wanted.name, now)
        case "leave":
            leave_team(connection, node_id)
        case "show":
            pass
        case _:
            assert_never(wanted.action)


def create_team(connection: Connection, node_id: str, name: str, now: float) -> None:
    """Make a team with the node as founder and first member. Raises RefusedError."""
    name = " ".join(name.split())
    if fault := fault_of(name):
        raise RefusedError("This name cannot be used for a team.", got=name, do=f"Use another name: {fault}.")
    own = select(credit.c.rollouts).where(credit.c.holder == node_id)
    if not connection.scalar(own):
        # Require credited work: anyone can make any number of node keys, and could make as many teams.
        raise RefusedError(
            "Nothing of this node's work has counted yet, so it cannot make a team.",
            do="Join a team, or wait until one of the node's rollouts was trained on or evaluated.",
        )
    if _team_id(connection, name) is not None:
        raise RefusedError("A team of this name already exists.", got=name, do=f"Join it: echo-node team join {name}")
    names = list(connection.scalars(select(teams.c.name)))
    if len(names) >= MOST_TEAMS:
        raise RefusedError("This hub has as many teams as it can keep.", do="Join one of them.")
    looks = looks_of(name)
    if alike := next((other for other in names if not looks.isdisjoint(looks_of(other))), None):
        raise RefusedError(
            "There is a team whose name looks like this one.",
            got=f"{name}, like {alike}",
            do=f"Use another name, or join that team: echo-node team join {alike}",
        )
    made = {"name": name, "name_key": name_key(name), "founder": node_id, "founded_at": now}
    connection.execute(insert(teams), made)
    ensure(connection, [team_holder(_team_id(connection, name) or 0)])
    join_team(connection, node_id, name, now)


def join_team(connection: Connection, node_id: str, name: str, now: float) -> None:
    """Move a node into a team, out of its former team. Raises RefusedError."""
    team_id = _team_id(connection, name)
    if team_id is None:
        raise RefusedError("There is no team of this name.", got=name, do="See the hub's page of teams: /teams")
    if connection.scalar(select(nodes.c.node_id).where(nodes.c.node_id == node_id)) is None:
        raise RefusedError("This node has never joined this hub's run.", got=node_id, do="echo-node join URL")
    if _team_of(connection, node_id) != team_id:
        leave_team(connection, node_id)
        connection.execute(insert(team_members), {"node_id": node_id, "team_id": team_id, "joined_at": now})


def leave_team(connection: Connection, node_id: str) -> None:
    """Take a node out of its team. Does nothing if it is in none."""
    team_id = _team_of(connection, node_id)
    if team_id is None:
        return
    connection.execute(delete(team_members).where(team_members.c.node_id == node_id))
    rest = connection.execute(select(team_members.c.node_id).where(team_members.c.team_id == team_id).limit(1)).first()
    earned = connection.scalar(select(credit.c.tokens).where(credit.c.holder == team_holder(team_id)))
    if rest is None and not earned:
        _delete(connection, team_id)


def remove_team(connection: Connection, name: str) -> bool:
    """Delete a team for the operator; its members keep their own credit. Return False if no team has this name."""
    team_id = _team_id(connection, name)
    if team_id is None:
        return False
    _delete(connection, team_id)
    return True


def read_team(connection: Connection, name: str, now: float) -> tuple[str, Holder] | None:
    """Return a team's holder id and all of its credit, by name; None if there is no such team."""
    team_id = _team_id(connection, name)
    found = None if team_id is None else read_holder(connection, team_holder(team_id), "team", now)
    return None if team_id is None or found is None else (team_holder(team_id), found)


def read_own_team(connection: Connection, node_id: str, now: float) -> Team:
    """Return the team of the node, with its credit and rank; an empty `Team` if the node is in none."""
    team_id = _team_of(connection, node_id)
    found = None if team_id is None else read_holder(connection, team_holder(team_id), "team", now)
    if found is None:
        return Team()
    standing = found.standing
    founder = connection.scalar(select(teams.c.founder).where(teams.c.team_id == team_id))
    return Team(
        name=standing.name,
        is_founder=founder == node_id,
        members=standing.members,
        rollouts=standing.rollouts,
        tokens=standing.tokens,
        tokens_per_day=standing.recent,
        rank=standing.rank if standing.rollouts else None,
        num_ranked=connection.scalar(select(func.count()).select_from(teams)) or 0,
        page=f"/teams/{quote(standing.name, safe='')}",
    )


def _team_id(connection: Connection, name: str) -> int | None:
    return connection.scalar(select(teams.c.team_id).where(teams.c.name_key == name_key(name)))


def _team_of(connection: Connection, node_id: str) -> int | None:
    return connection.scalar(select(team_members.c.team_id).where(team_members.c.node_id == node_id))


def _delete(connection: Connection, team_id: int) -> None:
    connection.execute(delete(team_members).where(team_members.c.team_id == team_id))
    connection.execute(delete(teams).where(teams.c.team_id == team_id))
    for table in (credit, credit_days, credit_steps):
        connection.execute(delete(table).where(table.c.holder == team_holder(team_id)))
