from __future__ import annotations

import pytest
from sqlalchemy import func, select

from echo_hub.core.effects import VersionRecorded
from echo_hub.core.spread.holdings import Arrival
from echo_hub.store import arrivals, old_fetches
from echo_hub.store.old_fetches import KEPT_VERSIONS
from echo_hub.store.store import Store
from echo_hub.store.tables import fetches
from echo_shared.messages import Fetched

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


def test_of_old_versions_there_is_what_their_fetches_came_to(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go a few rows at a time, from the oldest version on, beside as many as come in."""
    monkeypatch.setattr(arrivals, "forget_old_fetches", lambda connection, more: None)
    arrive(store, None, "a", 0.5)
    for version in range(1, VERSIONS + 1):
        store.apply([VersionRecorded(policy_version=version, published_at=float(version))], now=1.0)
        for number, node_id in enumerate("abc"):
            arrive(store, version, node_id, version + number)
    monkeypatch.undo()
    before = store.versions_history(VERSIONS), store.versions_by_transport()
    again = Store(store.engine, store.keeping)
    monkeypatch.setattr(old_fetches, "FORGOTTEN_AT_ONCE", 2)
    for done in range(2, 18, 2):
        store.prune(0)
        gone = min(done, 3 * 5)
        left = dict.fromkeys(range(1 + -(-gone // 3), VERSIONS + 1), 3)
        part = {-(-gone // 3): 3 - gone % 3} if gone % 3 else {}
        assert fetched_versions(store) == {None: 1, **part, **left}
    assert (store.versions_history(VERSIONS), store.versions_by_transport()) == before
    assert again.versions_history(VERSIONS) == before[0], "to somebody who has not seen them before"
    assert before[0][0].dissemination_max_s == 3.0


def test_as_many_rows_go_as_come_however_many_that_are(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_fetches, "FORGOTTEN_AT_ONCE", 1)
    for version in range(1, KEPT_VERSIONS + 30):
        store.apply([VersionRecorded(policy_version=version, published_at=float(version))], now=1.0)
        for node_id in "abc":
            arrive(store, version, node_id, 1.0)
    assert sum(fetched_versions(store).values()) <= 3 * (KEPT_VERSIONS + 1)


def test_what_is_said_of_an_old_version_changes_nothing(store: Store) -> None:
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
