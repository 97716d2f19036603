"""The leaderboard, read from the running totals in the table `credit`. Reads only; no receipts are counted.

The database ranks, sorts, searches and returns one page. A query reads one row for each node with credited work. Anyone
can make any number of node keys, but a key without credited work has no row, so such keys cannot slow the query down.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    Subquery,
    case,
    cast,
    func,
    literal,
    select,
    union_all,
)

from echo_hub.store import old_receipts
from echo_hub.store.credit import RUN, in_parts, team_holder, teams_of
from echo_hub.store.recent_average import average
from echo_hub.store.streaks import current, day_of
from echo_hub.store.tables import (
    checking,
    credit,
    credit_days,
    credit_elsewhere,
    credit_steps,
    groups,
    nodes,
    owners,
    rollouts,
    runs_elsewhere,
    tallies,
    team_members,
    teams,
)
from echo_hub.store.tallies import ANSWERED, EVALUATED, TRAINED, USEFUL
from echo_shared.records.credit import (
    Board,
    BoardKind,
    BoardQuery,
    CreditDay,
    CreditStanding,
    Holder,
    PublicReceipt,
    RunElsewhere,
    StepShare,
    WorkKinds,
)
from echo_shared.wire.messages import MAX_GROUP_SIZE, rollout_id

DAYS_SHOWN: Final = 366
PUBLIC_DIGITS: Final = 10
"""Length of the prefix of a node's id that public pages show."""
OWNER: Final = "/owner/"
"""Start of the name of a row (holder) on the leaderboard that stands for an owner; the owner's key follows."""
_LAST_ID: Final = "~"
"""A character that sorts after every character of a node id, for the upper end of a prefix search."""


def ranked(connection: Connection, kind: BoardKind) -> Subquery:
    """Select each node with credit, or each team, with its name and rank. Rank 1 has the most trained or evaluated
    rollouts; ties are ordered by name and id.

    An owner may have chosen one leaderboard entry for all its nodes; this entry then replaces the nodes' entries. The
    column `lead` is a node id. In a node's row it is the node itself. In an owner's row it is the owner's node with the
    most rollouts, whose name the row shows. In a team's row it is empty.
    """
    # Sort by code points, as Python does, whatever the database's locale is.
    collation = "C" if connection.dialect.name == "postgresql" else "BINARY"
    entries = (
        _of_all_nodes(connection)
        if kind == "node"
        else select(*_COLUMNS, teams.c.name.label("name"), literal("").label("lead"), literal(0.0).label("last_seen"))
        .select_from(credit.join(teams, _IS_TEAM))
        .where(credit.c.kind == "team")
        .subquery()
    )
    order = (entries.c.rollouts.desc(), entries.c.name.collate(collation), entries.c.holder.collate(collation))
    return select(entries, func.row_number().over(order_by=order).label("rank")).subquery()


_COLUMNS: Final = tuple(credit.c)
_IS_TEAM: Final = literal("/team/").concat(teams.c.team_id) == credit.c.holder
_HAS_CREDIT: Final = (credit.c.rollouts > 0) | (credit.c.elsewhere_rollouts > 0)
_STREAK_DAYS: Final = 10_000_000
"""A number above any streak. The last day times this number, plus the streak, orders rows by the last day, then by the
length of the streak.
"""


def _of_all_nodes(connection: Connection) -> Subquery:
    """Select the entries of nodes and of owners."""
    has_owners = connection.execute(select(owners.c.owner_key).limit(1)).first() is not None
    return union_all(_of_nodes(), _of_owners()).subquery() if has_owners else _of_nodes().subquery()


def _of_nodes() -> Select[Any]:
    """Select the entries of nodes. The nodes of owners with one entry have none."""
    foreign = select(func.max(credit_elsewhere.c.node_name)).where(credit_elsewhere.c.node_id == credit.c.holder)
    name = func.coalesce(nodes.c.name, foreign.scalar_subquery(), credit.c.holder)
    seen = func.coalesce(nodes.c.last_seen, 0.0)
    return (
        select(*_COLUMNS, name.label("name"), credit.c.holder.label("lead"), seen.label("last_seen"))
        .select_from(
            credit.outerjoin(nodes, nodes.c.node_id == credit.c.holder).outerjoin(
                owners, owners.c.owner_key == nodes.c.owner_key
            )
        )
        .where(credit.c.kind == "node", _HAS_CREDIT, owners.c.owner_key.is_(None))
    )


def _of_owners() -> Select[Any]:
    """Select the entries of owners who have chosen one entry for all their nodes: the sum over the owner's nodes with
    credit.

    `recent` and `steps` are approximate: they come from the owner's node with the largest value. `_standings` computes
    the exact recent average of the rows that it shows.
    """
    place = func.row_number().over(partition_by=nodes.c.owner_key, order_by=(credit.c.rollouts.desc(), nodes.c.node_id))
    owned = (
        select(*_COLUMNS, nodes.c.owner_key, nodes.c.name, nodes.c.last_seen, place.label("place"))
        .select_from(
            owners.join(nodes, nodes.c.owner_key == owners.c.owner_key).join(credit, credit.c.holder == nodes.c.node_id)
        )
        .where(credit.c.kind == "node", _HAS_CREDIT)
        .subquery()
    )
    of = owned.c

    def total(column: ColumnElement[int]) -> ColumnElement[int]:
        return cast(func.sum(column), BigInteger)  # PostgreSQL's sum of integers is a decimal number.

    last_and_streak = func.max(of.last_day * _STREAK_DAYS + of.streak_days)
    first = case((of.place == 1, of.holder))
    columns: dict[str, ColumnElement[Any]] = {
        "holder": literal(OWNER).concat(of.owner_key),
        "kind": literal("owner"),
        **{name: total(of[name]) for name in ("rollouts", "tokens")},
        "steps": func.max(of.steps),
        "recent": func.max(of.recent),
        "streak_days": func.coalesce(last_and_streak % _STREAK_DAYS, 0),
        "longest_streak": func.max(of.longest_streak),
        "first_day": func.min(of.first_day),
        "last_day": func.max(of.last_day),
        **{name: total(of[name]) for name in ("elsewhere_rollouts", "elsewhere_tokens")},
        "name": func.max(case((of.place == 1, of.name))),
        "lead": func.max(first),
        "last_seen": func.max(of.last_seen),
    }
    assert list(columns)[: len(_COLUMNS)] == [column.name for column in _COLUMNS], "a union goes by position"
    return select(*(column.label(name) for name, column in columns.items())).group_by(of.owner_key)


def _num_ranked(connection: Connection, kind: BoardKind) -> int:
    if kind == "team":
        of_teams = select(func.count()).select_from(credit.join(teams, _IS_TEAM)).where(credit.c.kind == "team")
        return connection.scalar(of_teams) or 0
    return connection.scalar(select(func.count()).select_from(_of_all_nodes(connection))) or 0


def read_board(connection: Connection, wanted: BoardQuery, now: float) -> Board:
    board = ranked(connection, wanted.kind)
    found = select(board)
    if wanted.search:
        name = func.lower(board.c.name).contains(wanted.search.lower(), autoescape=True)
        by_id = board.c.lead.startswith(wanted.search, autoescape=True)
        found = found.where(name | by_id if wanted.kind == "node" else name)
    if wanted.team:
        of_team = select(team_members.c.node_id).join(teams, teams.c.team_id == team_members.c.team_id)
        found = found.where(board.c.lead.in_(of_team.where(teams.c.name == wanted.team)))
    ordered = found.order_by(*_order(connection, board, wanted, day_of(now))).offset(wanted.after).limit(wanted.limit)
    rows = connection.execute(ordered).mappings().all()
    num_ranked = _num_ranked(connection, wanted.kind)
    is_all = not (wanted.search or wanted.team)
    num_found = num_ranked if is_all else connection.scalar(select(func.count()).select_from(found.subquery())) or 0
    has_elsewhere = connection.execute(select(runs_elsewhere.c.run_id).limit(1)).first() is not None
    return Board(
        rows=_standings(connection, rows, wanted.kind, now),
        num_found=num_found,
        num_ranked=num_ranked,
        has_elsewhere=has_elsewhere,
    )


def _order(connection: Connection, board: Subquery, wanted: BoardQuery, today: int) -> tuple[Any, ...]:
    collation = "C" if connection.dialect.name == "postgresql" else "BINARY"
    columns = {
        "rank": board.c.rank,
        "name": func.lower(board.c.name).collate(collation),
        "rollouts": board.c.rollouts,
        "tokens": board.c.tokens,
        # A missing average becomes 0, which sorts last: stored averages are logarithms far above 0.
        "recent": func.coalesce(board.c.recent, 0.0),
        "streak": case((board.c.last_day >= today - 1, board.c.streak_days), else_=0),
        "elsewhere": board.c.rollouts + board.c.elsewhere_rollouts,
        "seen": board.c.last_seen,
    }
    down = (wanted.order not in ("rank", "name")) != wanted.reverse
    column = columns[wanted.order]
    return (column.desc() if down else column.asc(), board.c.rank)


def _standings(connection: Connection, rows: Sequence[Any], kind: BoardKind, now: float) -> tuple[CreditStanding, ...]:
    total = connection.scalar(select(credit.c.rollouts).where(credit.c.holder == RUN)) or 0
    holders = [row["holder"] for row in rows]
    leads = {row["holder"]: row["lead"] for row in rows}
    teams_by_id, members = _teams(connection, [leads[one] if kind == "node" else one for one in holders], kind)
    owned = owners_nodes(connection, [holder for holder in holders if holder.startswith(OWNER)])
    recents = {holder: list(of_nodes.values()) for holder, of_nodes in owned.items()}
    works = _works(connection, [holder for holder in holders if holder not in owned]) if kind == "node" else {}
    works |= {holder: _together(_works(connection, of_nodes)) for holder, of_nodes in owned.items()}
    today = day_of(now)
    return tuple(
        CreditStanding(
            kind=kind,
            rank=int(row["rank"]),
            node=row["lead"][:PUBLIC_DIGITS],
            name=row["name"],
            team=teams_by_id.get(row["lead"], ""),
            members=members.get(row["holder"], len(owned.get(row["holder"], ()))),
            rollouts=row["rollouts"],
            tokens=row["tokens"],
            share=row["rollouts"] / max(total, 1),
            recent=sum(average(recent, now) for recent in recents.get(row["holder"], [row["recent"]])),
            steps=row["steps"],
            streak_days=current(row["streak_days"], row["last_day"], today),
            longest_streak=row["longest_streak"],
            first_day=row["first_day"],
            last_day=row["last_day"],
            elsewhere_rollouts=row["elsewhere_rollouts"],
            elsewhere_tokens=row["elsewhere_tokens"],
            last_seen=row["last_seen"],
            work=works.get(row["holder"], WorkKinds()),
        )
        for row in rows
    )


def _teams(connection: Connection, holders: Collection[str], kind: BoardKind) -> tuple[dict[str, str], dict[str, int]]:
    """For nodes, return team names by node id and an empty dictionary. For teams, return an empty dictionary and member
    counts by holder."""
    if kind == "node":
        team_of = teams_of(connection, holders)
        of_these = select(teams.c.team_id, teams.c.name).where(teams.c.team_id.in_(set(team_of.values())))
        names = {row.team_id: row.name for row in connection.execute(of_these)}
        return {node_id: names[team_id] for node_id, team_id in team_of.items()}, {}
    ids = [int(holder.rpartition("/")[2]) for holder in holders]
    counted = select(team_members.c.team_id, func.count().label("number")).where(team_members.c.team_id.in_(ids))
    rows = connection.execute(counted.group_by(team_members.c.team_id))
    return {}, {team_holder(row.team_id): row.number for row in rows}


def owners_nodes(connection: Connection, holders: Collection[str]) -> dict[str, dict[str, float | None]]:
    """Return, for each owner among `holders`, the stored recent average of each of its nodes with credit."""
    found: dict[str, dict[str, float | None]] = {holder: {} for holder in holders}
    for part in in_parts([holder.removeprefix(OWNER) for holder in holders]):
        of_these = (
            select(nodes.c.owner_key, credit.c.holder, credit.c.recent)
            .select_from(nodes.join(credit, credit.c.holder == nodes.c.node_id))
            .where(nodes.c.owner_key.in_(part), _HAS_CREDIT)
        )
        for row in connection.execute(of_these.order_by(credit.c.holder)):
            found[f"{OWNER}{row.owner_key}"][row.holder] = row.recent
    return found


def entries_of(connection: Connection, node_ids: Sequence[str]) -> dict[str, str]:
    """Return the holder of each node's entry on the leaderboard: the node itself, or its owner if the owner has chosen
    one entry for all its nodes.
    """
    found = dict(zip(node_ids, node_ids, strict=True))
    owned = select(nodes.c.node_id, nodes.c.owner_key).join(owners, owners.c.owner_key == nodes.c.owner_key)
    for part in in_parts(node_ids):
        for row in connection.execute(owned.where(nodes.c.node_id.in_(part))):
            found[row.node_id] = f"{OWNER}{row.owner_key}"
    return found


def _together(works: Mapping[str, WorkKinds]) -> WorkKinds:
    names = [each.name for each in fields(WorkKinds)]
    return WorkKinds(**{name: sum(getattr(work, name) for work in works.values()) for name in names})


def find_node(connection: Connection, start: str) -> str | None:
    """Return the id of the node with credit whose id begins with `start`. If there are several, return the one with the
    most rollouts."""
    if not start.isascii() or not start.isalnum():
        return None
    found = select(credit.c.holder).where(
        credit.c.kind == "node", credit.c.holder >= start, credit.c.holder <= start + _LAST_ID
    )
    return connection.scalar(found.order_by(credit.c.rollouts.desc(), credit.c.holder).limit(1))


def read_credited_node(connection: Connection, start: str, now: float) -> tuple[str, Holder] | None:
    """Return a node's full id and all its credit, given its id or a prefix of it; None if the node has no credit."""
    node_id = find_node(connection, start)
    found = None if node_id is None else read_holder(connection, node_id, "node", now)
    return None if node_id is None or found is None else (node_id, found)


def read_holder(connection: Connection, holder: str, kind: BoardKind, now: float) -> Holder | None:
    """Return all credit of one node or team; None if none of its work was credited."""
    board = ranked(connection, kind)
    rows = connection.execute(select(board).where(board.c.holder == holder)).mappings().all()
    if not rows and kind == "node":
        rows = connection.execute(_below_its_owner(board, holder, entries_of(connection, [holder]))).mappings().all()
    if not rows:
        return None
    (standing,) = _standings(connection, rows, kind, now)
    newest = select(credit_days).where(credit_days.c.holder == holder).order_by(credit_days.c.day.desc())
    days = [
        CreditDay(day=row.day, rollouts=row.rollouts, tokens=row.tokens)
        for row in connection.execute(newest.limit(DAYS_SHOWN))
    ]
    return Holder(
        standing=standing,
        days=tuple(reversed(days)),
        elsewhere=_elsewhere(connection, holder) if kind == "node" else (),
    )


def _below_its_owner(board: Subquery, node_id: str, entries: Mapping[str, str]) -> Select[Any]:
    """Select a node's own credit, with the rank of its owner. Used if the owner has one entry that replaces its nodes'
    entries.
    """
    rank = select(board.c.rank).where(board.c.holder == entries[node_id]).scalar_subquery()
    return (
        select(credit, nodes.c.name, credit.c.holder.label("lead"), nodes.c.last_seen, rank.label("rank"))
        .select_from(credit.join(nodes, nodes.c.node_id == credit.c.holder))
        .where(credit.c.holder == node_id, rank.is_not(None))
    )


def _works(connection: Connection, node_ids: Collection[str]) -> dict[str, WorkKinds]:
    """Return each node's credit by kind of work: training, evaluation, tenants' samples, and checks of other nodes'
    rollouts."""
    counted = select(tallies).where(tallies.c.outcome.in_(USEFUL))
    final: dict[tuple[str, str], Any] = {}
    by_others: dict[str, Any] = {}
    for part in in_parts(sorted(node_ids)):
        rows = connection.execute(counted.where(tallies.c.node_id.in_(part)))
        final |= {(row.node_id, row.outcome): row for row in rows}
        by_others |= {
            row.node_id: row for row in connection.execute(select(checking).where(checking.c.node_id.in_(part)))
        }
    found = {}
    for node_id in node_ids:
        trained, evaluated = final.get((node_id, TRAINED)), final.get((node_id, EVALUATED))
        answered = final.get((node_id, ANSWERED))
        checked = by_others.get(node_id)
        found[node_id] = WorkKinds(
            trained_rollouts=trained.rollouts if trained else 0,
            trained_tokens=trained.tokens if trained else 0,
            evaluated_rollouts=evaluated.rollouts if evaluated else 0,
            answered_rollouts=answered.rollouts if answered else 0,
            answered_tokens=answered.tokens if answered else 0,
            others_checked=checked.rollouts if checked else 0,
            others_checked_tokens=checked.tokens if checked else 0,
        )
    return found


def _elsewhere(connection: Connection, node_id: str) -> tuple[RunElsewhere, ...]:
    of_node = (
        select(
            runs_elsewhere.c.run_id, runs_elsewhere.c.run_name, credit_elsewhere.c.rollouts, credit_elsewhere.c.tokens
        )
        .join_from(credit_elsewhere, runs_elsewhere, runs_elsewhere.c.run_id == credit_elsewhere.c.run_id)
        .where(credit_elsewhere.c.node_id == node_id)
        .order_by(runs_elsewhere.c.issued_at, runs_elsewhere.c.run_id)
    )
    return tuple(RunElsewhere(**row) for row in connection.execute(of_node).mappings())


def read_shares(connection: Connection, holder: str, width: int) -> dict[int, StepShare]:
    """Return a holder's share of the work in each bucket of `width` consecutive steps. Buckets without work of the
    holder are left out.

    Bucket b holds steps b·width + 1 to (b + 1)·width.
    """
    bucket = (credit_steps.c.step - 1) // width
    sums = func.sum(credit_steps.c.rollouts).label("rollouts"), func.sum(credit_steps.c.tokens).label("tokens")
    of = {
        each: {
            int(row.bucket): row
            for row in connection.execute(
                select(bucket.label("bucket"), *sums).where(credit_steps.c.holder == each).group_by(bucket)
            )
        }
        for each in (holder, RUN)
    }
    return {
        number: StepShare(rollouts=int(row.rollouts), share=int(row.tokens) / max(int(of[RUN][number].tokens), 1))
        for number, row in of[holder].items()
    }


def read_public_receipt(connection: Connection, lease_id: int, index: int) -> PublicReceipt | None:
    """Return the public receipt of a rollout; None if no rollout with this id was ever leased."""
    if not (0 <= lease_id < 2**63 and 0 <= index < MAX_GROUP_SIZE):
        return None
    of_it = (rollouts.c.lease_id == lease_id, rollouts.c.index == index)
    columns = (rollouts.c[name] for name in old_receipts.FIELDS)
    row: Any = connection.execute(select(*columns).where(*of_it)).one_or_none()
    if row is None:
        row = old_receipts.find(connection, [(lease_id, index)]).get((lease_id, index))
    if row is None:
        return None
    name = connection.scalar(select(nodes.c.name).where(nodes.c.node_id == row.node_id))
    return PublicReceipt(
        rollout_id=rollout_id(lease_id, index),
        state=row.state,
        drop_reason=row.drop_reason,
        checked=row.checked,
        node=row.node_id[:PUBLIC_DIGITS],
        name=name or row.node_id[:PUBLIC_DIGITS],
        policy_version=row.policy_version,
        step=connection.scalar(select(groups.c.step).where(groups.c.group_id == row.group_id)),
        num_tokens=row.num_tokens,
        **{name: getattr(row, name) for name in old_receipts.TIMES},
    )
