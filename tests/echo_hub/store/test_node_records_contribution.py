"""The contribution on a node's certificate counts only the node's own rollouts that were used."""

from __future__ import annotations

from typing import Any

from echo_hub.core.accounting.effects import RolloutsDropped
from echo_hub.store.node_records import read_contribution
from echo_hub.store.reports import read_leaderboard
from echo_hub.store.store import Store
from echo_shared.records.contribution import moment
from echo_shared.signing.identity import Identity
from echo_shared.wire.messages import DropReason

HUB, NODE = Identity.generate(), Identity.generate()


def read(store: Store, node_id: str) -> Any:
    return store.read(read_contribution, node_id, run_id="run-1", run_name="a run", hub_key=HUB.public_key, now=50.0)


def seen(store: Store, node_id: str, now: float) -> None:
    store.node_seen(node_id=node_id, public_key=NODE.public_key, name="n", backend="torch", device="cpu", now=now)


def test_a_node_that_was_never_here_has_none(store: Store) -> None:
    assert read(store, "a") is None


def test_a_contribution_counts_only_the_nodes_own_used_rollouts(store: Store, records: Any) -> None:
    seen(store, "a", 10.0)
    seen(store, "a", 20.0)
    nothing = read(store, "a")
    assert (nothing.trained_rollouts, nothing.evaluated_tokens, nothing.checks_passed) == (0, 0, 0)
    assert (nothing.first_seen, nothing.last_seen, nothing.issued_at) == (moment(10.0), moment(20.0), moment(50.0))
    assert (nothing.node_key, nothing.hub_key) == (NODE.public_key.hex(), HUB.public_key.hex())
    store.apply(records.one_step(1, lease_id=1, group_id=0), now=21.0)
    store.apply(records.one_step(2, lease_id=2, group_id=1, node_id="b"), now=22.0)
    store.apply([*records.opened(2), records.leased(3, 2, 0), *records.received("3-0")], now=23.0)
    store.apply([RolloutsDropped(rollout_ids=("3-0",), reason=DropReason.STALE)], now=24.0)
    found = read(store, "a")
    (mine,) = [row for row in store.read(read_leaderboard) if row.node_id == "a"]
    assert (found.trained_rollouts, found.trained_tokens) == (2, mine.trained_tokens) and mine.trained_tokens > 0
    seen(store, "b", 30.0)
    assert read(store, "b").trained_rollouts == 2
