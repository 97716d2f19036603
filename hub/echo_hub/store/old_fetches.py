"""Who fetched which version is kept for the newest versions alone: of older ones what it came to is.

Else there would be a row for each node and version for ever. Totals are kept as they come in (`tallies`); how long a
version took to arrive is written down here, once, before the first of its rows goes.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Select, bindparam, delete, func, select, update

from echo_hub.store.tables import fetches, versions

KEPT_VERSIONS: Final = 64
FORGOTTEN_AT_ONCE: Final = 1_000
"""Rows that go whenever there is news, or old steps are let go, beside as many as have come."""

_KEY: Final = (fetches.c.node_id == bindparam("node"), fetches.c.info_hash == bindparam("hash"))
_OLDEST: Final = (
    select(fetches.c.policy_version)
    .where(fetches.c.policy_version.is_not(None))
    .order_by(fetches.c.policy_version)
    .limit(1)
)


def newest_forgotten(connection: Connection) -> int:
    """The newest version whose fetches are not noted any more."""
    newest = connection.scalar(select(func.max(versions.c.policy_version)))
    return (newest or 0) - KEPT_VERSIONS


def forget_old_fetches(connection: Connection, more: int = 0) -> None:
    """`FORGOTTEN_AT_ONCE` rows of the oldest versions, and so many more, as long as they are not of the newest."""
    forgotten, most = newest_forgotten(connection), FORGOTTEN_AT_ONCE + more
    while most > 0:
        version = connection.scalar(_OLDEST)
        if version is None or version > forgotten:
            return
        if connection.scalar(select(versions.c.arrived_max_s).where(versions.c.policy_version == version)) is None:
            arrived = {f"arrived_{name}_s": value for name, value in arrived_s(connection, version).items()}
            connection.execute(update(versions).where(versions.c.policy_version == version).values(arrived))
        oldest = select(fetches.c.node_id, fetches.c.info_hash).where(fetches.c.policy_version == version)
        gone = connection.execute(oldest.limit(min(most, FORGOTTEN_AT_ONCE))).all()
        connection.execute(delete(fetches).where(*_KEY), [{"node": row[0], "hash": row[1]} for row in gone])
        most -= len(gone)


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
