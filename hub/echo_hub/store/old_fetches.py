"""Who fetched which version is kept for the newest versions alone: of older ones what it came to is.

Else there would be a row for each node and version for ever. Totals are kept as they come in (`tallies`); how long a
version took to arrive is written down here, once, before the first of its rows goes.

    version     63      64       65       66 ...
    rows       gone    gone | to go    there
                            Place(64 | 65, at_s)

Rows go in the order of `ix_fetches_version`, and each part begins where the last one ended: in PostgreSQL's index the
entries of rows that are gone stay until it vacuums, and a search from the index's begin would look at all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, bindparam, delete, func, literal_column, select, update

from echo_hub.store.tables import fetches, versions

KEPT_VERSIONS: Final = 64
FORGOTTEN_AT_ONCE: Final = 1_000
"""Rows that go whenever there is news, or old steps are let go, beside as many as have come."""
ROWS_A_STATEMENT: Final = 128
"""Few enough for some milliseconds."""

_OLDEST: Final = (
    select(fetches.c.policy_version)
    .where(fetches.c.policy_version > bindparam("behind"))
    .order_by(fetches.c.policy_version)
    .limit(1)
)


@dataclass(frozen=True, slots=True)
class Place:
    """How far rows are gone: all of versions before `version`; and of that itself, all that came late (they have no
    `broadcast_s`) and all before `at_s`. None: all of it is gone, but for what came late."""

    version: int = -1
    at_s: float | None = None


def newest_forgotten(connection: Connection) -> int:
    """The newest version whose fetches are not noted any more."""
    newest = connection.scalar(select(func.max(versions.c.policy_version)))
    return (newest or 0) - KEPT_VERSIONS


def forget_old_fetches(connection: Connection, place: Place, more: int = 0) -> Place:
    """`FORGOTTEN_AT_ONCE` rows of the oldest versions, and so many more, as long as they are not of the newest. How far
    they are gone when this is committed; `Place()` is always right, and what to begin with."""
    forgotten, most = newest_forgotten(connection), FORGOTTEN_AT_ONCE + more
    while most > 0:
        part = min(most, ROWS_A_STATEMENT)
        if place.at_s is None:
            version = connection.scalar(_OLDEST, {"behind": place.version})
            if version is None or version > forgotten:
                break
            _note_arrived(connection, version)
            gone = _delete(connection, fetches.c.policy_version == version, fetches.c.broadcast_s.is_(None), most=part)
            if gone < part:
                place = Place(version, float("-inf"))
        else:
            rest = (fetches.c.policy_version == place.version, fetches.c.broadcast_s >= place.at_s)
            last_s = connection.scalar(_in_order(fetches.c.broadcast_s, *rest).offset(part - 1).limit(1))
            gone = _delete(connection, *rest, most=part)
            place = Place(place.version, last_s)
        most -= gone
    return place


def _note_arrived(connection: Connection, version: int) -> None:
    """Unless it is written down."""
    if connection.scalar(select(versions.c.arrived_max_s).where(versions.c.policy_version == version)) is None:
        arrived = {f"arrived_{name}_s": value for name, value in arrived_s(connection, version).items()}
        connection.execute(update(versions).where(versions.c.policy_version == version).values(arrived))


def _in_order(column: ColumnElement[Any], *which: ColumnElement[bool]) -> Select[Any]:
    """As the index has them."""
    return select(column).select_from(fetches).where(*which).order_by(fetches.c.policy_version, fetches.c.broadcast_s)


def _delete(connection: Connection, *which: ColumnElement[bool], most: int) -> int:
    """The first rows of these, found by where the database has them: so only one index is searched. How many."""
    is_sqlite = connection.dialect.name == "sqlite"
    row: ColumnElement[Any] = literal_column("rowid" if is_sqlite else "ctid")
    first = _in_order(row, *which).limit(most)
    one_of_them = row.in_(first) if is_sqlite else row == func.any(func.array(first.scalar_subquery()))
    return connection.execute(delete(fetches).where(one_of_them)).rowcount


def arrived_s(connection: Connection, version: int) -> dict[str, float | None]:
    """When half of the nodes that have it had this version, nearly all, and the last; None while none has. By an index
    of just these: the database counts along it."""
    of_version = (fetches.c.policy_version == version, fetches.c.broadcast_s.is_not(None))
    number = connection.scalar(select(func.count(fetches.c.broadcast_s)).where(*of_version)) or 0
    return {
        "p50": _at(connection, select(fetches.c.broadcast_s).where(*of_version), number, 50),
        "p95": _at(connection, select(fetches.c.broadcast_s).where(*of_version), number, 95),
        "max": _at(connection, select(fetches.c.broadcast_s).where(*of_version), number, 100),
    }


def _at(connection: Connection, seconds: Select[Any], number: int, percent: int) -> float | None:
    """The smallest that at least so many of a hundred do not exceed."""
    from_largest = number - -(-percent * number // 100)
    ordered = seconds.order_by(fetches.c.policy_version.desc(), fetches.c.broadcast_s.desc())
    found: float | None = connection.scalar(ordered.offset(from_largest).limit(1)) if number else None
    return found
