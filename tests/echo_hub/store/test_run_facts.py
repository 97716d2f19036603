from __future__ import annotations

from typing import Any

from echo_hub.store.run_facts import read_facts
from echo_hub.store.store import Store


def test_a_card_s_facts_are_the_run_s_totals(store: Store, records: Any) -> None:
    assert store.read(read_facts, 1).rollouts == 0
    for node_id in ("a", "b"):
        store.node_seen(node_id=node_id, public_key=bytes(32), name=node_id, backend="torch", device="cpu", now=1.0)
    for step, node_id in enumerate(("a", "b", "b"), 1):
        store.apply(records.one_step(step, lease_id=step, group_id=step - 1, node_id=node_id), now=1.0)
    store.count_all()
    facts = store.read(read_facts, 1)
    assert (facts.num_nodes, facts.rollouts) == (2, 6) and facts.tokens > 0 and facts.evaluations == ()
    assert facts.num_owners == 2
    for node_id in ("a", "b"):
        store.node_seen(
            node_id=node_id, public_key=bytes(32), name=node_id, backend="t", device="d", now=2.0, owner_key=bytes(32)
        )
    assert store.read(read_facts, 1).num_owners == 1
