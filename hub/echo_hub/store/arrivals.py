"""Record how each version was announced, and which nodes have fetched which artefact (the base model or a version).

Only the first report of a node about an artefact counts. Reports about a version whose fetch rows were already deleted
are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, insert, select, update

from echo_hub.spread.holdings import Arrival, Release
from echo_hub.store.bulk import among
from echo_hub.store.old_fetches import FetchMark, forget_old_fetches, newest_forgotten
from echo_hub.store.tables import fetches, versions
from echo_hub.store.tallies import bytes_by_source, tally_fetches

NODES_A_QUERY: Final = 128
"""Number of nodes looked up in one statement. Such a statement takes a few milliseconds."""


def write_news(connection: Connection, news: Sequence[Release | Arrival], now: float, place: FetchMark) -> FetchMark:
    """Write releases (announced versions) and arrivals (finished fetches) in order. Then delete old fetch rows: twice
    as many as were added, plus a fixed number, so that the table shrinks.

    Deletion continues at `place`. Return where the next deletion continues, as `forget_old_fetches` does.
    """
    forgotten = newest_forgotten(connection)
    for one in news:
        if isinstance(one, Release):
            _write_release(connection, one)
    fresh = _fresh(connection, [one for one in news if isinstance(one, Arrival)], now, forgotten)
    if fresh:
        connection.execute(insert(fetches), fresh)
        of_versions = [row for row in fresh if row["policy_version"] is not None]
        tally_fetches(connection, [(row["policy_version"], bytes_by_source(row)) for row in of_versions])
    return forget_old_fetches(connection, place, 2 * len(fresh))


def _write_release(connection: Connection, release: Release) -> None:
    way = release.way.value if release.way else None
    known = {"payload_bytes": release.payload_bytes, "carrier": release.carrier, "way": way}
    connection.execute(update(versions).where(versions.c.policy_version == release.policy_version).values(known))


def _fresh(connection: Connection, arrivals: Sequence[Arrival], now: float, forgotten: int) -> list[dict[str, Any]]:
    """Return rows for arrivals that are not stored yet, except for old versions whose fetches are no longer kept."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for arrival in arrivals:
        version = arrival.fetched.policy_version
        if version is None or version > forgotten:
            row = _row(arrival, now)
            rows.setdefault((row["node_id"], row["info_hash"]), row)
    by_hash: dict[str, list[str]] = {}
    for node_id, info_hash in rows:
        by_hash.setdefault(info_hash, []).append(node_id)
    for info_hash, node_ids in by_hash.items():
        for start in range(0, len(node_ids), NODES_A_QUERY):
            part = node_ids[start : start + NODES_A_QUERY]
            known = select(fetches.c.node_id).where(
                among(connection, fetches.c.node_id, part), fetches.c.info_hash == info_hash
            )
            for node_id in connection.scalars(known):
                del rows[node_id, info_hash]
    return list(rows.values())


def _row(arrival: Arrival, now: float) -> dict[str, Any]:
    fetch = arrival.fetched
    return {
        "node_id": arrival.node_id,
        "info_hash": fetch.info_hash.hex(),
        "policy_version": fetch.policy_version,
        "seconds": fetch.seconds,
        "swarm_bytes": fetch.swarm_bytes,
        "web_seed_bytes": fetch.web_seed_bytes,
        "shared_memory_bytes": fetch.shared_memory_bytes,
        "pushed_bytes": fetch.pushed_bytes,
        "mesh_bytes": fetch.mesh_bytes,
        "model_hub_bytes": fetch.model_hub_bytes,
        "broadcast_s": arrival.broadcast_s,
        "fetched_at": now,
    }
