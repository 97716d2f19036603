"""In both databases, a search for rollouts by any conditions finds each match once, page by page, and reads few
rows.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from sqlalchemy import insert, text

from echo_hub.core.accounting.effects import CheckRecorded, GroupDropped, RolloutsDropped
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.store import browsing
from echo_hub.store.browsing import NEWEST, find_rollouts, read_batch_rewards, read_group
from echo_hub.store.store import Store
from echo_hub.store.tables import rollouts
from echo_shared.records.rollout import RolloutFilter
from echo_shared.wire.messages import Checked, DropReason


@pytest.fixture
def filled(store: Store, records: Any) -> Store:
    """Return a store with six steps, each of one group of two, leased to nodes a and b in turn; then one dropped group,
    and one whose rollout is still leased.
    """
    for name in "ab":
        store.node_seen(node_id=name, public_key=bytes(32), name=f"node {name}", backend="t", device="d", now=1.0)
    for step in range(1, 7):
        store.apply(records.one_step(step, lease_id=step, group_id=step - 1, node_id="ab"[step % 2]), now=float(step))
    store.apply([CheckRecorded(rollout_id="2-1", checked=Checked.FAILED)], now=7.0)
    store.apply([CheckRecorded(rollout_id="5-0", checked=Checked.PASSED)], now=7.0)
    flat = [*records.opened(6), records.leased(7, 6, 0, 1, version=4), *records.received("7-0", "7-1")]
    store.apply([*flat, *records.scored("7-0", "7-1")], now=8.0)
    gone = RolloutsDropped(rollout_ids=("7-0", "7-1"), reason=DropReason.NO_ADVANTAGE, detail="all equal")
    store.apply([gone, GroupDropped(group_id=6, reason=DropReason.NO_ADVANTAGE)], now=9.0)
    store.apply([*records.opened(7), records.leased(8, 7, 0, node_id="c", version=5)], now=10.0)
    return store


def ids(store: Store, limit: int = 100, **wanted: Any) -> list[str]:
    found = store.read(find_rollouts, RolloutFilter(**wanted), NEWEST, limit)
    assert found.before is None
    return [each.rollout_id for each in found.rollouts]


ALL = ["8-0", "7-1", "7-0", *(f"{lease}-{index}" for lease in range(6, 0, -1) for index in (1, 0))]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, ALL),
        ({"step": 3}, ["3-1", "3-0"]),
        ({"step": 99}, []),
        ({"group": 6}, ["7-1", "7-0"]),
        ({"node": "b"}, ["5-1", "5-0", "3-1", "3-0", "1-1", "1-0"]),
        ({"node": "nobody"}, []),
        ({"version": 4}, ["7-1", "7-0"]),
        ({"version": 0}, ALL[3:]),
        ({"state": "leased"}, ["8-0"]),
        ({"state": "trained"}, ALL[3:]),
        ({"drop": "no_advantage"}, ["7-1", "7-0"]),
        ({"check": "failed"}, ["2-1"]),
        ({"check": "passed"}, ["5-0"]),
        ({"check": "no"}, [name for name in ALL if name not in ("2-1", "5-0")]),
        ({"reward_min": 0.5}, [name for name in ALL if name.endswith("-1")]),
        ({"reward_max": 0.5, "node": "b"}, ["5-0", "3-0", "1-0"]),
        ({"reward_min": 1.0, "reward_max": 1.0, "step": 2}, ["2-1"]),
        ({"tokens_min": 3, "node": "b"}, ["5-1", "3-1", "1-1"]),
        ({"tokens_min": 2, "tokens_max": 2, "drop": "no_advantage"}, ["7-0"]),
        ({"node": "a", "check": "failed", "version": 0}, ["2-1"]),
        ({"node": "b", "check": "failed"}, []),
        ({"step": 2, "group": 1, "node": "a", "state": "trained", "check": "failed"}, ["2-1"]),
    ],
)
def test_every_condition_is_met(filled: Store, wanted: dict[str, Any], expected: list[str]) -> None:
    assert ids(filled, **wanted) == expected


@pytest.mark.parametrize("wanted", [{}, {"state": "trained"}, {"version": 0}, {"node": "b", "reward_min": 0.0}])
@pytest.mark.parametrize("limit", [1, 4, 5])
def test_pages_hold_everything_once_and_in_order(filled: Store, wanted: dict[str, Any], limit: int) -> None:
    found, before = [], NEWEST
    while True:
        page = filled.read(find_rollouts, RolloutFilter(**wanted), before, limit)
        found += [each.rollout_id for each in page.rollouts]
        assert len(page.rollouts) <= limit
        if page.before is None:
            break
        before = page.before
    assert found == ids(filled, **wanted) and len(found) >= 6


def test_an_answer_scans_few_rows_and_says_where_the_next_page_begins(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browsing, "LOOKED_AT", 4)
    wanted, found, before, answers = RolloutFilter(reward_max=0.0), [], NEWEST, 0
    while True:
        page = filled.read(find_rollouts, wanted, before, 10)
        answers += 1
        found += [each.rollout_id for each in page.rollouts]
        if page.before is None:
            break
        before = page.before
    assert found == [name for name in ALL if name.endswith("-0") and name != "8-0"]
    assert answers == 4


def test_a_row_says_all_that_is_known(filled: Store) -> None:
    (row,) = filled.read(find_rollouts, RolloutFilter(node="a", reward_min=1.0, step=4), NEWEST, 5).rollouts
    assert asdict(row) == {
        "rollout_id": "4-1",
        "task": "",
        "components": None,
        "group_id": 3,
        "index": 1,
        "turn": 0,
        "step": 4,
        "evaluation": "",
        "node_id": "a",
        "node_name": "node a",
        "policy_version": 0,
        "state": "trained",
        "drop_reason": None,
        "detail": "",
        "checked": "no",
        "reward": 1.0,
        "turn_reward": None,
        "num_tokens": 3,
        "leased_at": 4.0,
        "received_at": 10.0,
        "scored_at": 4.0,
        "final_at": 4.0,
        "not_kept": "",
    }
    (dropped, _) = filled.read(find_rollouts, RolloutFilter(group=6), NEWEST, 5).rollouts
    assert (dropped.drop_reason, dropped.detail, dropped.step) == ("no_advantage", "all equal", None)
    assert filled.read(find_rollouts, RolloutFilter(node="c"), NEWEST, 5).rollouts[0].node_name == "c"


def test_a_group_is_read_with_its_step(filled: Store) -> None:
    group = filled.read(read_group, 3)
    assert group is not None
    assert (group.step, group.drop_reason, group.staleness, group.opened_at) == (4, None, 0, 4.0)
    assert (group.planned_at, group.trained_at, group.published_at) == (20.0, 34.0, 44.0)
    assert [each.rollout_id for each in group.rollouts] == ["4-0", "4-1"]
    dropped = filled.read(read_group, 6)
    assert dropped is not None and (dropped.step, dropped.drop_reason) == (None, "no_advantage")
    assert filled.read(read_group, 99) is None
    assert [(end.rollout_id, end.reward, end.num_tokens) for end in filled.read(read_batch_rewards, 4)] == [
        ("4-0", 0.0, 2),
        ("4-1", 1.0, 3),
    ]
    assert filled.read(read_batch_rewards, 99) == []


def test_evaluation_rollouts_name_their_problem(store: Store, records: Any) -> None:
    group_id = EvaluationGroup(policy_version=3, greedy=False, number=11).group_id
    store.apply([records.leased(4, group_id, 0, version=3)], now=1.0)
    (row,) = store.read(find_rollouts, RolloutFilter(version=3), NEWEST, 5).rollouts
    assert (row.evaluation, row.step) == ("held-out problem 11, sampled", None)
    group = store.read(read_group, group_id)
    assert group is not None and group.opened_at is None


MANY = 12_000


@pytest.fixture
def many(store: Store) -> Store:
    """Return a store with many rollouts; only few are dropped, failed their check, or belong to the node "rare"."""
    rows = [
        {
            "lease_id": number // 2 + 1,
            "index": number % 2,
            "node_id": "rare" if number % 3_000 == 0 else f"n{number % 7}",
            "group_id": number // 8,
            "policy_version": number // 300,
            "leased_at": float(number),
            "deadline": 0.0,
            "state": "dropped" if number % 1_500 == 1 else "trained",
            "drop_reason": "forged" if number % 1_500 == 1 else None,
            "reward": number / MANY,
            "num_tokens": number % 100,
            "checked": "failed" if number % 4_000 == 2 else "no",
        }
        for number in range(MANY)
    ]
    with store.engine.begin() as connection:
        connection.execute(insert(rollouts), rows)
        if connection.dialect.name == "postgresql":
            connection.execute(text("ANALYZE rollouts"))
    return store


INDEX_OF = {
    RolloutFilter(): "pkey|PRIMARY KEY",
    RolloutFilter(node="rare"): "ix_rollouts_node",
    RolloutFilter(version=3): "ix_rollouts_version",
    RolloutFilter(drop="forged"): "ix_rollouts_dropped",
    RolloutFilter(check="failed"): "ix_rollouts_checked",
    RolloutFilter(group=5): "ix_rollouts_group",
}


def test_each_condition_is_looked_up_in_its_index_in_the_order_of_leases(many: Store) -> None:
    """Without an index, a search would read the whole table of a long run. The table in this test is large enough that
    the database prefers an index.
    """
    for wanted, index in INDEX_OF.items():
        for asked in (wanted, replace(wanted, reward_min=0.5)):
            plan = plan_of(many, asked)
            assert any(name in plan for name in index.split("|")), plan
            assert "SCAN rollouts" not in plan and "Seq Scan on rollouts" not in plan, plan
            # PostgreSQL may sort a few rows instead of reading them in order, and SQLite may sort rows with a second
            # condition.
            assert wanted.group is not None or asked is not wanted or "TEMP B-TREE" not in plan, plan


def plan_of(store: Store, wanted: RolloutFilter) -> str:
    from sqlalchemy.event import listen, remove

    heard: list[tuple[str, Any]] = []

    def hear(_connection: Any, _cursor: Any, sql: str, given: Any, _context: Any, _many: bool) -> None:
        if "policy_version" in sql:
            heard.append((sql, given))

    listen(store.engine, "before_cursor_execute", hear)
    try:
        store.read(find_rollouts, wanted, NEWEST, 50)
    finally:
        remove(store.engine, "before_cursor_execute", hear)
    (sql, given), *_ = heard
    with store.engine.connect() as connection:
        explain = "EXPLAIN QUERY PLAN" if connection.dialect.name == "sqlite" else "EXPLAIN"
        return "\n".join(str(row[-1]) for row in connection.exec_driver_sql(f"{explain} {sql}", given))
