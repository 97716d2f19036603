from __future__ import annotations

from typing import Any

import pytest

from echo_hub.spread.holdings import Arrival
from echo_hub.store.recent import (
    ARRIVALS_READ,
    NodeKind,
    RecentRollout,
    Spread,
    read_node_kinds,
    read_recent_rollouts,
    read_spreads,
)
from echo_hub.store.store import Store
from echo_shared.wire.messages import Fetched


def arrival(node_id: str, version: int, broadcast_s: float | None) -> Arrival:
    fetched = Fetched(
        info_hash=version.to_bytes(20), policy_version=version, seconds=9.0, swarm_bytes=7, web_seed_bytes=0
    )
    return Arrival(node_id=node_id, fetched=fetched, broadcast_s=broadcast_s)


def test_the_newest_leases_come_first_in_any_state(store: Store, records: Any) -> None:
    store.apply(records.one_step(1, lease_id=1, group_id=0), now=5.0)
    store.apply([*records.opened(7), records.leased(2, 7, 0, node_id="b")], now=8.0)
    newest, before = store.read(read_recent_rollouts, 2)
    assert newest == RecentRollout(node_id="b", leased_at=8.0, received_at=None)
    assert before == RecentRollout(node_id="a", leased_at=5.0, received_at=10.0, sampling_s=0.5)
    assert len(store.read(read_recent_rollouts, 9)) == 3


def test_versions_on_their_way(store: Store, records: Any) -> None:
    for step in (1, 2):
        store.apply(records.one_step(step, lease_id=step, group_id=step), now=5.0)
    store.record_distribution([arrival("a", 2, 3.0), arrival("b", 2, 0.5), arrival("c", 2, None)], now=6.0)
    newest, before = store.read(read_spreads, 5)
    assert (newest.policy_version, newest.seconds) == (2, (0.5, 3.0))
    assert before == Spread(policy_version=1, trained_at=31.0, published_at=41.0, seconds=())
    assert ARRIVALS_READ > 10_000, "a quantile of fewer arrivals would say little of a large fleet"


@pytest.mark.parametrize("number", [2, 1_500])
def test_kinds_of_nodes_that_have_joined(store: Store, number: int) -> None:
    store.node_seen(node_id="n1", public_key=b"k", name="x", backend="torch", device="RTX 4070", now=1.0)
    asked = [f"n{each}" for each in range(number)]
    assert store.read(read_node_kinds, asked) == {"n1": NodeKind(backend="torch", device="RTX 4070")}
