from __future__ import annotations

import re
import sqlite3
from typing import Any

import pytest
from sqlalchemy import Connection, func, insert, select
from sqlalchemy.event import listen, remove
from sqlalchemy.exc import OperationalError

from echo_hub.core.accounting.effects import VersionRecorded
from echo_hub.spread.holdings import Arrival
from echo_hub.store import arrivals, old_fetches
from echo_hub.store.old_fetches import KEPT_VERSIONS
from echo_hub.store.reports import read_versions_by_transport
from echo_hub.store.store import Store
from echo_hub.store.tables import fetches, versions
from echo_shared.errors import StorageError
from echo_shared.wire.messages import Fetched

VERSIONS = KEPT_VERSIONS + 5


def arrive(store: Store, version: int | None, node_id: str, seconds: float) -> None:
    fetched = Fetched(
        info_hash=(version or 0).to_bytes(20),
        policy_version=version,
        seconds=1.0,
        swarm_bytes=10,
        web_seed_bytes=0,
        shared_memory_bytes=0,
        pushed_bytes=0,
        mesh_bytes=0,
    )
    store.record_distribution([Arrival(node_id=node_id, fetched=fetched, broadcast_s=seconds)], now=1.0)


def fetched_versions(store: Store) -> dict[int | None, int]:
    with store.engine.connect() as connection:
        number = func.count().label("number")
        rows = connection.execute(select(fetches.c.policy_version, number).group_by(fetches.c.policy_version))
        return {row.policy_version: row.number for row in rows}


def test_old_versions_keep_the_summary_of_their_fetches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of old fetches are replaced by a summary, a few rows at a time and the oldest version first. Meanwhile no
    page may show a difference.
    """
    monkeypatch.setattr(arrivals, "forget_old_fetches", lambda connection, place, more: place)
    arrive(store, None, "a", 0.5)
    for version in range(1, VERSIONS + 1):
        store.apply([VersionRecorded(policy_version=version, published_at=float(version))], now=1.0)
        for number, node_id in enumerate("abc"):
            arrive(store, version, node_id, version + number)
    monkeypatch.undo()
    before = store.versions_history(VERSIONS), store.read(read_versions_by_transport)
    again = Store(store.engine, store.keeping)
    monkeypatch.setattr(old_fetches, "FORGOTTEN_AT_ONCE", 2)
    for done in range(2, 18, 2):
        store.prune(0)
        gone = min(done, 3 * 5)
        left = dict.fromkeys(range(1 + -(-gone // 3), VERSIONS + 1), 3)
        part = {-(-gone // 3): 3 - gone % 3} if gone % 3 else {}
        assert fetched_versions(store) == {None: 1, **part, **left}
    assert (store.versions_history(VERSIONS), store.read(read_versions_by_transport)) == before
    assert again.versions_history(VERSIONS) == before[0], "a store with an empty cache reads the same"
    assert before[0][0].dissemination_max_s == 3.0


def test_deletion_keeps_up_with_any_number_of_new_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_fetches, "FORGOTTEN_AT_ONCE", 1)
    for version in range(1, KEPT_VERSIONS + 30):
        store.apply([VersionRecorded(policy_version=version, published_at=float(version))], now=1.0)
        for node_id in "abc":
            arrive(store, version, node_id, 1.0)
    assert sum(fetched_versions(store).values()) <= 3 * (KEPT_VERSIONS + 1)


def test_late_fetches_of_an_old_version_change_nothing(store: Store) -> None:
    store.apply([VersionRecorded(policy_version=1, published_at=1.0)], now=1.0)
    arrive(store, 1, "a", 2.0)
    store.apply([VersionRecorded(policy_version=KEPT_VERSIONS + 1, published_at=1.0)], now=1.0)
    store.prune(0)
    for node_id in "ab":
        arrive(store, 1, node_id, 90.0)
    store.prune(0)
    assert fetched_versions(store) == {}
    first = Store(store.engine, store.keeping).versions_history(9)[0]
    assert (first.dissemination_p50_s, first.dissemination_max_s) == (2.0, 2.0)
    assert first.fetches_by_transport == {"swarm": 1}


def fill(store: Store, *, nodes: int, forgotten: int) -> None:
    """Fill the store with fetches that may be forgotten; rows are not in order of time. One fetch in ten came late; of
    the others, the first ones all took 2/8 s.
    """
    numbers = range(1, forgotten + KEPT_VERSIONS + 1)
    with store.engine.execution_options(writes=True).begin() as connection:
        connection.execute(insert(versions), [{"policy_version": n, "published_at": 1.0} for n in numbers])
        rows = [
            {
                "node_id": f"n{node}",
                "info_hash": f"{version:040x}",
                "policy_version": version,
                "seconds": 1.0,
                "swarm_bytes": 1,
                "web_seed_bytes": 0,
                "fetched_at": 1.0,
                "broadcast_s": max(2, node * 7_919 % nodes) / 8 if node % 10 else None,
            }
            for version in range(1, forgotten + 1)
            for node in range(nodes)
        ]
        connection.execute(insert(fetches), rows)


def forget_all(store: Store) -> None:
    while sum(fetched_versions(store).values()):
        before = sum(fetched_versions(store).values())
        store.prune(0)
        assert sum(fetched_versions(store).values()) < before


def test_late_and_simultaneous_fetches_are_forgotten_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another store must continue where the first one stopped, without missing late or simultaneous fetches."""
    fill(store, nodes=40, forgotten=3)
    monkeypatch.setattr(old_fetches, "FORGOTTEN_AT_ONCE", 7)
    monkeypatch.setattr(old_fetches, "ROWS_A_STATEMENT", 3)
    left = [120]
    for _ in range(6):
        store.prune(0)
        left.append(sum(fetched_versions(store).values()))
    assert left == [120, 113, 106, 99, 92, 85, 78]
    again = Store(store.engine, store.keeping)
    forget_all(again)
    assert all(row.dissemination_max_s == 39 / 8 for row in again.versions_history(VERSIONS)[:3])


def test_after_a_failed_commit_the_next_prune_forgets_the_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, nodes=20, forgotten=2)
    monkeypatch.setattr(old_fetches, "FORGOTTEN_AT_ONCE", 9)

    def fail(_connection: Connection) -> None:
        raise OperationalError("COMMIT", None, sqlite3.OperationalError("disk I/O error"))

    listen(store.engine, "commit", fail)
    for call in (lambda: store.prune(0), lambda: store.record_distribution([], now=1.0)):
        with pytest.raises(StorageError):
            call()
    remove(store.engine, "commit", fail)
    assert fetched_versions(store) == {1: 20, 2: 20}
    forget_all(store)


def test_postgresql_reads_no_dead_rows(empty_postgresql: str) -> None:
    """PostgreSQL keeps deleted rows until a vacuum. A statement that read them would cost one page per row here."""
    store = Store.open(empty_postgresql)
    fill(store, nodes=3_000, forgotten=2)
    looked_at: dict[str, int] = {}

    def explain(connection: Connection, _cursor: Any, sql: str, given: Any, _context: Any, many: bool) -> None:
        of_all = "DESC" in sql or "count" in sql  # Reads all of a version's rows, once, before the first is deleted.
        if not re.match(r"(SELECT|DELETE)[^;]*\sFROM fetches", sql) or of_all or many:
            return
        with connection.begin_nested() as once:
            found = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", given).scalar_one()
            once.rollback()
        plan = found[0]["Plan"]
        pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        looked_at[sql] = max(looked_at.get(sql, 0), pages)

    listen(store.engine, "before_cursor_execute", explain)
    forget_all(store)
    remove(store.engine, "before_cursor_execute", explain)
    assert len(looked_at) == 4, "one query each: oldest version, late fetches, end of a part, delete"
    # A statement finds each row twice: by the index, then by its physical position in the table (ctid).
    assert max(looked_at.values()) < 3 * old_fetches.ROWS_A_STATEMENT, looked_at
    store.close()
