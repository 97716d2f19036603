from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text

from echo_hub.core.accounting.effects import (
    CheckingCredited,
    CostAccrued,
    NodeCost,
    RolloutsDropped,
    RolloutsEvaluated,
    StepTrained,
)
from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID
from echo_hub.store import tallies
from echo_hub.store.recent import read_node_kinds
from echo_hub.store.reports import read_accounting, read_costs, read_leaderboard
from echo_hub.store.store import Store
from echo_hub.store.tallies import SOURCES, Source, main_transport, read_useful_nodes
from echo_shared.records.rollout import DrawnSpan
from echo_shared.records.run import CostTotals
from echo_shared.wire.messages import DropReason


def counted(store: Store) -> tuple[Counter[Any], Counter[Any], Counter[Any]]:
    """Count the rows: rollouts by state and by drop reason, and trained rollouts, their tokens, received and dropped
    rollouts by node.
    """
    states: Counter[Any] = Counter()
    reasons: Counter[Any] = Counter()
    nodes: Counter[Any] = Counter()
    with store.engine.connect() as connection:
        for row in connection.execute(text("SELECT node_id, state, drop_reason, num_tokens FROM rollouts")):
            states["in flight" if row.state in ("leased", "received", "scored") else row.state] += 1
            reasons[row.drop_reason] += row.drop_reason is not None
            nodes[row.node_id, "trained"] += row.state == "trained"
            nodes[row.node_id, "tokens"] += row.num_tokens if row.state == "trained" else 0
            nodes[row.node_id, "received"] += row.num_tokens is not None
            nodes[row.node_id, "dropped"] += row.state == "dropped"
    return +states, +reasons, +nodes


def shown(store: Store) -> tuple[Counter[Any], Counter[Any], Counter[Any]]:
    """Return the same counts from the tallies that pages read."""
    books = store.read(read_accounting)
    nodes: Counter[Any] = Counter()
    for row in store.read(read_leaderboard):
        nodes[row.node_id, "trained"] = row.trained_rollouts
        nodes[row.node_id, "tokens"] = row.trained_tokens
        nodes[row.node_id, "received"] = row.received
        nodes[row.node_id, "dropped"] = row.dropped
    assert books.balanced
    states = Counter(
        {
            "trained": books.trained,
            "evaluated": books.evaluated,
            "dropped": books.num_dropped,
            "in flight": books.in_flight,
        }
    )
    return +states, Counter(books.dropped), +nodes


def test_evaluated_rollouts_are_credited(store: Store, records: Any) -> None:
    store.apply(records.one_step(1, lease_id=1, group_id=0, node_id="learned"), now=1.0)
    group = FIRST_EVALUATION_ID
    store.apply([records.leased(2, group, 0, 1, 2, node_id="measured")], now=1.0)
    ids = ("2-0", "2-1", "2-2")
    store.apply(
        [*records.received(*ids), *records.scored(*ids), *(RolloutsEvaluated(rollout_ids=(name,)) for name in ids)],
        now=2.0,
    )
    books = store.read(read_accounting)
    assert (books.leased, books.trained, books.evaluated, books.num_dropped, books.in_flight) == (5, 2, 3, 0, 0)
    assert [(row.node_id, row.evaluated_rollouts, row.dropped, row.share) for row in store.read(read_leaderboard)] == [
        ("measured", 3, 0, 3 / 5),
        ("learned", 0, 0, 2 / 5),
    ]
    assert counted(store)[0] == shown(store)[0]


def test_every_token_is_credited_to_the_node_that_drew_it(store: Store, records: Any) -> None:
    """Node b finished both rollouts; nodes a and c each sampled one token of the second."""
    store.apply([*records.opened(0), records.leased(1, 0, 0, 1, node_id="b")], now=1.0)
    first, second = records.received("1-0", "1-1")
    drawn = (("a", 0, 1), ("c", 2, 1), ("b", 2, 1))
    spans = tuple(DrawnSpan(node_id=who, policy_version=version, num_tokens=count) for who, version, count in drawn)
    store.apply([first, replace(second, payload=replace(second.payload, spans=spans))], now=2.0)
    ids = ("1-0", "1-1")
    trained = StepTrained(step=1, rollout_ids=ids, metrics={}, trained_at=3.0, drawn_by_several=("1-1",))
    store.apply([*records.scored(*ids), records.planned(1, (0,), ids), trained], now=3.0)
    rows = {
        row.node_id: (row.trained_rollouts, row.trained_tokens, row.received) for row in store.read(read_leaderboard)
    }
    assert rows == {"a": (0, 1, 0), "b": (2, 2 + 1, 2), "c": (0, 1, 0)}
    assert store.read(read_accounting).balanced


def test_the_totals_are_those_of_the_receipts(store: Store, records: Any) -> None:
    rng = np.random.default_rng(0)
    for step in range(1, 9):
        store.apply(records.one_step(step, lease_id=step, group_id=step - 1, node_id=f"n{step % 3}"), now=1.0)
        lease = 100 + step
        store.apply([*records.opened(lease), records.leased(lease, lease, 0, 1, 2, node_id=f"n{step % 2}")], now=1.0)
        store.apply(records.received(f"{lease}-0"), now=1.0)
        lost = [f"{lease}-{index}" for index in range(3) if rng.random() < 0.6]
        for reason, ids in ((DropReason.STALE, lost[:1]), (DropReason.EXPIRED, lost[1:])):
            if ids:
                store.apply([RolloutsDropped(rollout_ids=tuple(ids), reason=reason)], now=1.0)
        assert shown(store) == counted(store)
    books = store.read(read_accounting)
    assert books.leased == 8 * 2 + 8 * 3 == books.trained + books.num_dropped + books.in_flight


def test_only_nodes_with_trained_rollouts_are_useful(store: Store, records: Any) -> None:
    store.apply([*records.opened(5), records.leased(5, 5, 0, 1, 2, node_id="silent")], now=1.0)
    assert store.read(read_useful_nodes) == frozenset()
    store.apply([RolloutsDropped(rollout_ids=("5-0",), reason=DropReason.EXPIRED)], now=2.0)
    store.apply(records.one_step(1, lease_id=1, group_id=0, node_id="learned"), now=3.0)
    assert store.read(read_useful_nodes) == {"learned"}


def test_more_than_one_query_takes(store: Store, records: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tallies, "LEASES_A_QUERY", 2)
    store.apply(records.opened(*range(1, 6)), now=1.0)
    store.apply([records.leased(lease, lease, *range(4)) for lease in range(1, 6)], now=1.0)
    ids = tuple(f"{lease}-{index}" for lease in range(1, 6) for index in range(3))
    store.apply([RolloutsDropped(rollout_ids=ids, reason=DropReason.REVOKED)], now=1.0)
    assert store.read(read_accounting).dropped == {"revoked": 15}
    assert shown(store) == counted(store)


def test_costs_add_up_by_node(store: Store, records: Any) -> None:
    assert store.read(read_costs) == CostTotals()
    store.apply([CostAccrued(nodes=(NodeCost("a", 5.0, 0.125), NodeCost("b", 2.5, 0.25)))], now=1.0)
    store.apply([CostAccrued(nodes=(NodeCost("a", 5.0, 0.125), NodeCost("a", 1.0, 0.5)))], now=2.0)
    assert store.read(read_costs) == CostTotals(dollars=1.0, active_s=13.5)
    store.node_seen(
        node_id="a",
        public_key=b"k",
        name="a",
        backend="torch",
        device="d",
        now=1.0,
        cost_per_hour=0.4,
        power_watts=220.0,
    )
    by_node = {row.node_id: row for row in store.read(read_leaderboard)}
    assert (by_node["a"].cost, by_node["a"].active_s) == (0.75, 11.0)
    assert (by_node["a"].cost_per_hour, by_node["a"].power_watts) == (0.4, 220.0)
    kind = store.read(read_node_kinds, ["a"])["a"]
    assert (kind.cost_per_hour, kind.power_watts) == (0.4, 220.0)


@pytest.mark.parametrize(
    ("fetched", "expected"),
    [
        ({"swarm": 5, "web_seed": 4}, "swarm"),
        ({"swarm": 5, "web_seed": 5}, "swarm"),
        ({"swarm": 4, "web_seed": 5}, "web_seed"),
        ({"shared_memory": 9}, "shared_memory"),
        ({}, "swarm"),
        ({"pushed": 9, "swarm": 5}, "inline"),
        ({"pushed": 3, "mesh": 6, "swarm": 8}, "broadcast"),
        ({"pushed": 8, "mesh": 1}, "broadcast"),
        ({"pushed": 3, "mesh": 4, "web_seed": 8}, "web_seed"),
    ],
)
def test_the_main_transport(fetched: dict[Source, int], expected: str) -> None:
    assert main_transport(dict.fromkeys(SOURCES, 0) | fetched) == expected


def test_checks_by_nodes_add_up(store: Store) -> None:
    for node_id in "ab":
        store.node_seen(node_id=node_id, public_key=node_id.encode(), name=node_id, backend="", device="", now=1.0)
    credits = [
        CheckingCredited(node_id=node_id, num_tokens=count) for node_id, count in (("a", 10), ("a", 5), ("b", 1))
    ]
    store.apply(credits, now=1.0)
    store.apply(credits[:1], now=2.0)
    shown = {row.node_id: (row.others_checked, row.others_checked_tokens) for row in store.read(read_leaderboard)}
    assert shown == {"a": (3, 25), "b": (1, 1)}
