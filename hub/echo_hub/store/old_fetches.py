"""Keep fetch rows, one for each node and version, for the newest versions only.

Without deletion, the table would grow by one row for each node and version forever. Totals are updated as fetches come
in (`tallies`). How long a version took to arrive is written to the version's row once, before the first of its fetch
rows is deleted.

    version    63      64                      65      66 ...
    rows       gone    gone | to be deleted    kept
                            FetchMark(64, at_s)

Rows are deleted in the order of `ix_fetches_version`, and each deletion starts where the last one ended. In PostgreSQL,
index entries of deleted rows stay until VACUUM. A search from the index's start would read all these entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, bindparam, delete, func, literal_column, select, update

from echo_hub.store.tables import fetches, versions

KEPT_VERSIONS: Final = 64
FORGOTTEN_AT_ONCE: Final = 1_000
"""Number of rows deleted by each call of `forget_old_fetches`, in addition to the `more` that the caller asks for. The
hub calls this for each batch of releases and arrivals, and when it deletes the tokens of old steps.
"""
ROWS_A_STATEMENT: Final = 128
"""Number of rows in one DELETE. Such a statement takes a few milliseconds."""

_OLDEST: Final = (
    select(fetches.c.policy_version)
    .where(fetches.c.policy_version > bindparam("behind"))
    .order_by(fetches.c.policy_version)
    .limit(1)
)


@dataclass(frozen=True, slots=True)
class FetchMark:
    """The point up to which fetch rows are deleted. No row of a version before `version` is left. In `version` itself,
    late arrivals (rows without `broadcast_s`) and rows with `broadcast_s` before `at_s` are deleted. If `at_s` is None,
    all rows of `version` are deleted.
    """

    version: int = -1
    at_s: float | None = None


def newest_forgotten(connection: Connection) -> int:
    """Return the newest version that is so old that its fetches are no longer recorded."""
    newest = connection.scalar(select(func.max(versions.c.policy_version)))
    return (newest or 0) - KEPT_VERSIONS


def forget_old_fetches(connection: Connection, place: FetchMark, more: int = 0) -> FetchMark:
    """Delete `FORGOTTEN_AT_ONCE + more` fetch rows of the oldest versions, but none of the `KEPT_VERSIONS` newest.

    `place` is where the last call ended; `FetchMark()` if unknown. Return where the next call continues, once this
    transaction is committed.
    """
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
                place = FetchMark(version, float("-inf"))
        else:
            rest = (fetches.c.policy_version == place.version, fetches.c.broadcast_s >= place.at_s)
            last_s = connection.scalar(_in_order(fetches.c.broadcast_s, *rest).offset(part - 1).limit(1))
            gone = _delete(connection, *rest, most=part)
            place = FetchMark(place.version, last_s)
        most -= gone
    return place


def _note_arrived(connection: Connection, version: int) -> None:
    if connection.scalar(select(versions.c.arrived_max_s).where(versions.c.policy_version == version)) is None:
        arrived = {f"arrived_{name}_s": value for name, value in arrived_s(connection, version).items()}
        connection.execute(update(versions).where(versions.c.policy_version == version).values(arrived))


def _in_order(column: ColumnElement[Any], *which: ColumnElement[bool]) -> Select[Any]:
    return select(column).select_from(fetches).where(*which).order_by(fetches.c.policy_version, fetches.c.broadcast_s)


def _delete(connection: Connection, *which: ColumnElement[bool], most: int) -> int:
    """Delete at most `most` of the matching rows, in index order, and return how many were deleted.

    Rows are named by their physical position (rowid, ctid), so that the database searches only one index.
    """
    is_sqlite = connection.dialect.name == "sqlite"
    row: ColumnElement[Any] = literal_column("rowid" if is_sqlite else "ctid")
    first = _in_order(row, *which).limit(most)
    one_of_them = row.in_(first) if is_sqlite else row == func.any(func.array(first.scalar_subquery()))
    return connection.execute(delete(fetches).where(one_of_them)).rowcount


def arrived_s(connection: Connection, version: int) -> dict[str, float | None]:
    """Return the times at which half of a version's nodes, 95 % of them, and the last one had the version.

    The values are seconds after the announcement; None before the first fetch. The database counts inside an index,
    without reading the rows.
    """
    of_version = (fetches.c.policy_version == version, fetches.c.broadcast_s.is_not(None))
    number = connection.scalar(select(func.count(fetches.c.broadcast_s)).where(*of_version)) or 0
    return {
        "p50": _at(connection, select(fetches.c.broadcast_s).where(*of_version), number, 50),
        "p95": _at(connection, select(fetches.c.broadcast_s).where(*of_version), number, 95),
        "max": _at(connection, select(fetches.c.broadcast_s).where(*of_version), number, 100),
    }


def _at(connection: Connection, seconds: Select[Any], number: int, percent: int) -> float | None:
    """Return a percentile of `number` sorted values: the smallest value for which at least `percent` % of the values
    are not larger.
    """
    from_largest = number - -(-percent * number // 100)
    ordered = seconds.order_by(fetches.c.policy_version.desc(), fetches.c.broadcast_s.desc())
    found: float | None = connection.scalar(ordered.offset(from_largest).limit(1)) if number else None
    return found
