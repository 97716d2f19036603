"""Old rows are removed, but pages and nodes can still read summaries of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import Connection, func, select, text
from sqlalchemy.event import listen, remove

from echo_hub.actions.records import ActionOutcome
from echo_hub.core.accounting.effects import (
    CheckRecorded,
    GroupDropped,
    RolloutsDropped,
    RolloutsEvaluated,
    ScoreRecorded,
)
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.store import retiring
from echo_hub.store.actions import read_action_log
from echo_hub.store.board import read_board, read_public_receipt, read_shares
from echo_hub.store.browsing import NEWEST, find_rollouts, read_batch_rewards, read_group
from echo_hub.store.credits import read_credits
from echo_hub.store.database import open_to_read
from echo_hub.store.keeping import read_kept_totals
from echo_hub.store.node_records import read_contribution
from echo_hub.store.reading import read_evaluated, read_payloads, read_receipts
from echo_hub.store.reports import read_accounting, read_costs, read_evaluations, read_leaderboard, read_steps
from echo_hub.store.retired import RetiredMark, StepSpan, read_last
from echo_hub.store.retiring import FACTS, Copies, read_final_keys, read_first_mark, read_ripe, retire
from echo_hub.store.store import Store
from echo_hub.store.tables import kept, rollouts
from echo_hub.store.unfinished import read_snapshot
from echo_shared.errors import LocalProtocolError, StorageError
from echo_shared.records.credit import BoardQuery
from echo_shared.records.rollout import RolloutFilter
from echo_shared.records.run import Evaluation, EvaluationKind
from echo_shared.wire.messages import Checked, DropReason

STEPS = 6
IDS = [f"{step}-{index}" for step in range(1, STEPS + 1) for index in (0, 1)]


@pytest.fixture
def filled(store: Store, records: Any) -> Store:
    """Return a store of six steps by two nodes in turn, whose tokens are pruned. A group between the first two steps
    was dropped, and version 1 was evaluated.
    """
    for node_id in "ab":
        store.node_seen(node_id=node_id, public_key=bytes(32), name=node_id, backend="t", device="d", now=1.0)
    for step in range(1, STEPS + 1):
        store.apply(
            records.one_step(step, lease_id=step, group_id=2 * step, node_id="ab"[step % 2]), now=10.0 + step / 8
        )
    store.apply([*records.opened(3), records.leased(21, 3, 0, 1)], now=12.0)
    flat = RolloutsDropped(rollout_ids=("21-0", "21-1"), reason=DropReason.NO_ADVANTAGE, detail="all alike")
    store.apply([flat, GroupDropped(group_id=3, reason=DropReason.NO_ADVANTAGE)], now=12.5)
    measured = EvaluationGroup(policy_version=1, greedy=True, number=0).group_id
    store.apply([records.leased(22, measured, 0, version=1), *records.received("22-0")], now=13.0)
    store.apply([ScoreRecorded(rollout_id="22-0", reward=1.0), RolloutsEvaluated(rollout_ids=("22-0",))], now=13.5)
    record(store, 1)
    store.apply([CheckRecorded(rollout_id="1-0", checked=Checked.PASSED)], now=14.0)
    store.prune(STEPS)
    return store


def record(store: Store, version: int) -> None:
    store.record_evaluations(
        [
            Evaluation(
                policy_version=version,
                kind=EvaluationKind.GREEDY,
                num_problems=1,
                samples=1,
                num_unscored=0,
                accuracy=1.0,
                accuracy_error=0.0,
                pass_at={},
                mean_reward=1.0,
                mean_tokens=2.0,
                share_truncated=0.0,
                seconds=1.0,
                evaluated_at=14.0,
            )
        ]
    )


def spans(store: Store, before_step: int) -> list[StepSpan]:
    last = store.read(read_last)
    marks = [store.read(read_first_mark) if last is None else last.through]
    marks += [one.mark for one in store.read(read_ripe, marks[0], before_step)]
    return [StepSpan(after=after, through=through) for after, through in pairwise(marks)]


def let_go(store: Store, before_step: int) -> int:
    return sum(retire(store, store.read(read_final_keys, span), span) for span in spans(store, before_step))


def rows_of(store: Store) -> int:
    with open_to_read(store.engine) as connection:
        return connection.scalar(select(func.count()).select_from(rollouts)) or 0


def told(store: Store) -> dict[str, Any]:
    """Return everything about the run that users and nodes can read."""
    credit = store
    return {
        "receipts": {node_id: store.read(read_receipts, node_id, [*IDS, "21-0", "22-0", "99-0"]) for node_id in "abc"},
        "public": [
            credit.read(read_public_receipt, lease, index) for lease in (1, 2, 6, 21, 22, 99) for index in (0, 1)
        ],
        "leaderboard": store.read(read_leaderboard),
        "board": credit.read(read_board, BoardQuery(), now=20.0),
        "credits": store.read(read_credits, "ab"),
        "shares": credit.read(read_shares, "a", width=2),
        "certificates": [
            store.read(read_contribution, node_id, run_id="r", run_name="r", hub_key=bytes(32), now=20.0)
            for node_id in "ab"
        ],
        "accounting": store.read(read_accounting),
        "steps": store.read(read_steps),
        "evaluations": store.read(read_evaluations),
        "costs": store.read(read_costs),
    }


def test_retiring_changes_only_the_rows_and_their_totals(filled: Store) -> None:
    before, snapshot = told(filled), filled.read(read_snapshot)
    assert rows_of(filled) == 2 * STEPS + 3 and filled.read(read_kept_totals).rollouts == 2 * STEPS + 1
    assert let_go(filled, 4) == 9, "three steps, the dropped group between them, and the evaluation of version 1"
    assert rows_of(filled) == 6
    assert told(filled) == before
    assert filled.read(read_snapshot) == snapshot
    totals = filled.read(read_kept_totals)
    assert (totals.rollouts, totals.rollouts_retired, totals.retired_step) == (6, 9, 3)
    with open_to_read(filled.engine) as connection:
        sizes = connection.scalars(select(kept.c.size_bytes)).all()
    assert (len(sizes), sum(sizes)) == (6, totals.bytes)
    assert let_go(filled, 4) == 0


def test_retired_groups_are_reported_as_retired(filled: Store) -> None:
    let_go(filled, 4)
    assert filled.read(find_rollouts, RolloutFilter(step=1), NEWEST, 9).rollouts == ()
    gone, dropped, there = (filled.read(read_group, group_id) for group_id in (2, 3, 8))
    assert gone is not None and gone.retired and gone.rollouts == () and gone.step == 1
    assert dropped is not None and dropped.retired and dropped.drop_reason == "no_advantage"
    assert there is not None and not there.retired and len(there.rollouts) == 2
    assert filled.read(read_group, 99) is None
    assert filled.read(read_payloads, IDS) == [] and filled.read(read_batch_rewards, 1) == []


def test_the_last_lease_is_not_given_again_when_all_rows_have_left(filled: Store) -> None:
    assert let_go(filled, STEPS + 1) == 2 * STEPS + 3 and rows_of(filled) == 0
    snapshot = filled.read(read_snapshot)
    assert snapshot.next_lease_id == 23 and snapshot.next_group_id == 2 * STEPS + 1
    assert snapshot.trained_steps == STEPS and snapshot.rollouts == ()


@pytest.mark.parametrize("what", ["open", "leased", "not pruned"])
def test_rows_that_may_be_needed_delay_newer_ones(store: Store, records: Any, what: str) -> None:
    for step in (1, 2, 3):
        store.apply(records.one_step(step, lease_id=step, group_id=2 * step), now=1.0)
    store.apply([*records.opened(3), records.leased(9, 3, 0)], now=1.0)
    if what == "leased":
        store.apply([GroupDropped(group_id=3, reason=DropReason.STALE)], now=1.0)
    if what == "not pruned":
        stale = RolloutsDropped(rollout_ids=("9-0",), reason=DropReason.STALE)
        store.apply([stale, GroupDropped(group_id=3, reason=DropReason.STALE)], now=1.0)
    store.prune(1 if what == "not pruned" else 3)
    assert [one.mark for one in store.read(read_ripe, store.read(read_first_mark), 9)] == [RetiredMark(step=1, group=2)]
    if what == "not pruned":
        store.prune(3)
    else:
        store.apply([RolloutsDropped(rollout_ids=("9-0",), reason=DropReason.STALE)], now=2.0)
    if what == "open":
        store.apply([GroupDropped(group_id=3, reason=DropReason.STALE)], now=2.0)
    assert [one.mark.step for one in store.read(read_ripe, store.read(read_first_mark), 9)] == [1, 2, 3]
    assert let_go(store, 9) == 7 and rows_of(store) == 0


def test_an_evaluation_that_is_not_recorded_stays(store: Store, records: Any) -> None:
    store.apply(records.one_step(1, lease_id=1, group_id=0), now=1.0)
    group_id = EvaluationGroup(policy_version=0, greedy=True, number=0).group_id
    store.apply([records.leased(2, group_id, 0), *records.received("2-0")], now=1.0)
    store.apply([ScoreRecorded(rollout_id="2-0", reward=1.0), RolloutsEvaluated(rollout_ids=("2-0",))], now=1.0)
    store.prune(1)
    assert let_go(store, 2) == 2
    assert store.read(read_snapshot).evaluated == {(group_id, 0)} and len(store.read(read_evaluated, 0)) == 1


def test_a_check_that_ends_late_is_on_the_receipt(filled: Store) -> None:
    let_go(filled, 4)
    late = [CheckRecorded(rollout_id=name, checked=Checked.FAILED) for name in ("2-0", "6-1")]
    filled.apply(late, now=30.0)
    old, new = filled.read(read_receipts, "a", ["2-0", "6-1"])
    assert (old.checked, new.checked) == (Checked.FAILED, Checked.FAILED)
    with pytest.raises(LocalProtocolError, match="do not fit"):
        filled.apply([CheckRecorded(rollout_id="77-0", checked=Checked.FAILED)], now=30.0)


def copies_of(store: Store, **changed: Any) -> Copies:
    found = store.read(find_rollouts, RolloutFilter(), NEWEST, 99).rollouts
    facts = {one.rollout_id: {name: getattr(one, name) for name in FACTS} for one in found}
    facts["1-0"] |= changed
    return Copies(facts=facts, who="ada", place="/archive/steps.parquet", now=40.0)


def test_rows_that_differ_from_their_copies_are_kept(filled: Store) -> None:
    span, *_ = spans(filled, 2)
    keys = filled.read(read_final_keys, span)
    with pytest.raises(StorageError, match="differ on a rollout") as caught:
        retire(filled, keys, span, copies_of(filled, reward=0.5))
    assert "rollout 1-0" in str(caught.value)
    assert (
        rows_of(filled) == 2 * STEPS + 3
        and filled.read(read_last) is None
        and filled.read(read_action_log, limit=9) == []
    )
    assert retire(filled, keys, span, copies_of(filled)) == len(keys) and filled.read(read_last) == span
    (noted,) = filled.read(read_action_log, limit=9)
    assert (noted.who, noted.via, noted.action, noted.outcome) == ("ada", "cli", "archive", ActionOutcome.DONE)
    assert noted.request == {"steps": "1 to 1", "file": "/archive/steps.parquet"}


def test_unfinished_rollouts_are_never_retired(store: Store, records: Any) -> None:
    store.apply([*records.opened(0), records.leased(1, 0, 0)], now=1.0)
    span = StepSpan(after=RetiredMark(step=0, group=-1), through=RetiredMark(step=1, group=0))
    with pytest.raises(LocalProtocolError, match="not final"):
        retire(store, [(1, 0)], span)
    assert rows_of(store) == 1


def test_an_older_span_does_not_take_the_mark_back(filled: Store) -> None:
    first, second, *_ = spans(filled, 4)
    retire(filled, filled.read(read_final_keys, second), second)
    retire(filled, filled.read(read_final_keys, first), first)
    assert filled.read(read_last) == second


def test_retiring_waits_briefly_for_rows_that_another_writer_holds(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers must not deadlock: the server would end one transaction, perhaps the hub's."""
    if filled.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer")
    span, *_ = spans(filled, 2)
    keys, copies = filled.read(read_final_keys, span), copies_of(filled)
    tries = []
    with monkeypatch.context() as patched, filled.engine.begin() as held:
        held.execute(select(rollouts).where(rollouts.c.lease_id == 1).with_for_update())
        patched.setattr(retiring, "TRIES", 2)
        patched.setattr(retiring, "_wait_briefly", lambda at: (tries.append(at), briefly(at)))
        with pytest.raises(StorageError, match="another process keeps their rows locked"):
            retire(filled, keys, span, copies)
    assert len(tries) == 2 and rows_of(filled) == 2 * STEPS + 3
    assert retire(filled, keys, span, copies) == len(keys)


briefly = retiring._wait_briefly


def test_postgresql_searches_only_unfinished_rows_for_open_work(empty_postgresql: str) -> None:
    store = Store.open(empty_postgresql)
    with store.engine.begin() as connection:
        columns = 'lease_id, "index", node_id, group_id, policy_version, leased_at, deadline, state'
        values = "n, 0, 'a', n, 0, 1.0, 1.0, CASE WHEN n <= 10000 THEN 'trained' ELSE 'leased' END"
        connection.execute(text(f"INSERT INTO rollouts ({columns}) SELECT {values} FROM generate_series(1, 10200) n"))
        connection.execute(text("ANALYZE"))
    looked_at: list[int] = []

    def explain(connection: Connection, _cursor: Any, sql: str, given: Any, _context: Any, _many: bool) -> None:
        if sql.startswith("SELECT min(rollouts"):
            plans = [connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", given).scalar_one()[0]["Plan"]]
            for plan in plans:
                plans += plan.get("Plans", [])
                looked_at.append(plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0))

    listen(store.engine, "before_cursor_execute", explain)
    store.read(read_ripe, RetiredMark(step=0, group=-1), 9)
    remove(store.engine, "before_cursor_execute", explain)
    assert looked_at and max(looked_at) == 200, "the plan reads the 200 unfinished rows of 10,200"
    store.close()
