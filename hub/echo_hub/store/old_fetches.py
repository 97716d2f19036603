"""Who fetched which version is kept for the newest versions alone: of older ones what it came to is.

Else there would be a row for each node and version for ever. Totals are kept as they come in (`tallies`); how long a
version took to arrive is written down here, once, before its rows go.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, delete, func, select, update

from echo_hub.core.spread.holdings import quantile
from echo_hub.store.tables import fetches, versions

KEPT_VERSIONS: Final = 64
FORGOTTEN_AT_ONCE: Final = 2
"""Versions in one transaction: each has as many rows as there are nodes."""


def newest_forgotten(connection: Connection) -> int:
    """The newest version whose fetches are not noted any more."""
    newest = connection.scalar(select(func.max(versions.c.policy_version)))
    return (newest or 0) - KEPT_VERSIONS


def forget_old_fetches(connection: Connection) -> None:
    """Of the oldest versions that still have rows, as long as they are not among the newest."""
    forgotten = newest_forgotten(connection)
    oldest = select(fetches.c.policy_version).where(fetches.c.policy_version.is_not(None))
    for _ in range(FORGOTTEN_AT_ONCE):
        version = connection.scalar(oldest.order_by(fetches.c.policy_version).limit(1))
        if version is None or version > forgotten:
            return
        seconds = sorted(
            connection.scalars(
                select(fetches.c.broadcast_s).where(
                    fetches.c.policy_version == version, fetches.c.broadcast_s.is_not(None)
                )
            )
        )
        connection.execute(
            update(versions)
            .where(versions.c.policy_version == version)
            .values(
                arrived_p50_s=quantile(seconds, 0.5),
                arrived_p95_s=quantile(seconds, 0.95),
                arrived_max_s=quantile(seconds, 1.0),
            )
        )
        connection.execute(delete(fetches).where(fetches.c.policy_version == version))
