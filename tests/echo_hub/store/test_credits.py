from __future__ import annotations

from typing import Any

import pytest

from echo_hub.core.accounting.effects import RolloutsDropped
from echo_hub.store import credits as credits_module
from echo_hub.store.board import read_board
from echo_hub.store.credits import Credit, read_credits
from echo_hub.store.store import Store
from echo_shared.records.credit import BoardQuery
from echo_shared.wire.messages import DropReason


def join(store: Store, node_id: str, name: str) -> None:
    store.node_seen(node_id=node_id, public_key=bytes(32), name=name, backend="torch", device="cpu", now=1.0)


def test_a_nodes_credit_equals_its_receipts(store: Store, records: Any) -> None:
    join(store, "a", "a's")
    store.apply(records.one_step(1, lease_id=1, group_id=0, node_id="a"), now=1.0)
    store.apply(records.one_step(2, lease_id=2, group_id=1, node_id="b"), now=1.0)
    store.apply([*records.opened(3), records.leased(4, 3, 0, 1, node_id="a"), *records.received("4-0")], now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("4-0",), reason=DropReason.STALE)], now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("4-1",), reason=DropReason.EXPIRED)], now=1.0)
    assert store.read(read_credits, ["a", "new"]) == {
        "a": Credit(trained=2, trained_tokens=5, dropped={"expired": 1, "stale": 1}, share=0.5, rank=1, num_ranked=2),
        "new": Credit(num_ranked=2),
    }


def test_ranks_are_the_leaderboards(store: Store, records: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credits_module, "KEYS_A_QUERY", 2)
    # All shares are equal, so the name decides; a database with the collation of a language would order these names
    # differently.
    names = {"a1": "zoe", "b2": "Zoe", "c3": "äpfel", "d4": "apple", "e5": "apple", "f6": "_"}
    for node_id, name in names.items():
        join(store, node_id, name)
    workers = [*names, "a1", "unknown", "d4", "b2"]
    for step, node_id in enumerate(workers, start=1):
        store.apply(records.one_step(step, lease_id=step, group_id=step - 1, node_id=node_id), now=1.0)
    join(store, "idle", "idle")
    board = {row.node: (row.rank, row.share) for row in store.read(read_board, BoardQuery(), 1.0).rows}
    credits = store.read(read_credits, [*names, "unknown", "idle"])
    assert {node_id: one.rank for node_id, one in credits.items() if node_id != "idle"} == {
        node_id: rank for node_id, (rank, _) in board.items()
    }
    assert all(credits[node_id].share == pytest.approx(share) for node_id, (_, share) in board.items())
    assert credits["idle"] == Credit(num_ranked=7)


def test_unknown_nodes_have_empty_credit(store: Store) -> None:
    assert store.read(read_credits, []) == {}
    assert store.read(read_credits, ["a"]) == {"a": Credit()}
