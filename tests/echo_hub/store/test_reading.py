from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.event import listen

from echo_hub.core.accounting.effects import GroupDropped, GroupOpened, GroupsRated, RolloutsDropped, VersionRecorded
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot, GroupRow, StepRow, UnfinishedRollout
from echo_hub.core.policy.curriculum import GroupResult
from echo_hub.store.reading import read_payloads, read_receipts, read_turns
from echo_hub.store.store import Store
from echo_hub.store.unfinished import read_snapshot
from echo_shared.wire.messages import MAX_BATCHED, MAX_GROUP_SIZE, DropReason, Receipt, ReceiptState


def test_an_empty_store_is_a_new_run(store: Store) -> None:
    assert store.read(read_snapshot) == CoordinatorSnapshot()


def test_the_snapshot_holds_all_that_is_unfinished(store: Store, records: Any) -> None:
    store.apply(records.one_step(1, lease_id=1, group_id=0), now=1.0)
    store.apply([*records.opened(1, 2, 3, 4), records.leased(2, 1, 0, 1)], now=2.0)
    store.apply([records.leased(3, 2, 0, 1, version=1)], now=2.0)
    store.apply([*records.received("2-0", "2-1", "3-0"), *records.scored("2-0", "2-1")], now=3.0)
    store.apply([records.planned(2, (1,), ("2-0", "2-1"))], now=4.0)
    store.apply([GroupDropped(group_id=3, reason=DropReason.STALE)], now=5.0)
    store.apply([GroupDropped(group_id=4, reason=DropReason.NO_ADVANTAGE)], now=5.0)
    store.apply([VersionRecorded(policy_version=4, published_at=6.0)], now=6.0)

    def row(lease_id: int, index: int, num_tokens: int, state: ReceiptState, reward: float | None) -> UnfinishedRollout:
        return UnfinishedRollout(
            rollout_id=f"{lease_id}-{index}",
            lease_id=lease_id,
            node_id="a",
            group_id=lease_id - 1,
            index=index,
            policy_version=lease_id - 2,
            deadline=99.5,
            state=state,
            num_tokens=num_tokens,
            reward=reward,
        )

    assert store.read(read_snapshot) == CoordinatorSnapshot(
        next_group_id=5,
        next_lease_id=4,
        groups=(GroupRow(group_id=1, seed=2**64 - 2), GroupRow(group_id=2, seed=2**64 - 3)),
        rollouts=(
            row(2, 0, 2, ReceiptState.SCORED, 0.0),
            row(2, 1, 3, ReceiptState.SCORED, 1.0),
            row(3, 0, 4, ReceiptState.RECEIVED, None),
            row(3, 1, 0, ReceiptState.LEASED, None),
        ),
        newest_planned_group=1,
        flat_groups=(4,),
        batch_sizes=(1, 1),
        trained_steps=1,
        planned=(StepRow(step=2, group_ids=(1,), rollout_ids=("2-0", "2-1")),),
        published_version=4,
        replayable=frozenset({1}),
    )


def test_the_snapshot_holds_prompts_and_how_well_groups_did(store: Store, records: Any) -> None:
    prompt = 2**64 - 5
    store.apply([GroupOpened(group_id=9, seed=1, prompt=prompt), *records.opened(0, 1, 2)], now=1.0)
    store.apply([GroupsRated(pass_rates=((1, 0.25), (9, 1.0)))], now=2.0)
    store.apply([GroupsRated(pass_rates=((0, 0.0),))], now=3.0)
    snapshot = store.read(read_snapshot)
    assert {group.group_id: group.prompt for group in snapshot.groups} == {0: None, 1: None, 2: None, 9: prompt}
    assert snapshot.results == (
        GroupResult(group_id=0, prompt=None, pass_rate=0.0),
        GroupResult(group_id=1, prompt=None, pass_rate=0.25),
        GroupResult(group_id=9, prompt=prompt, pass_rate=1.0),
    )


def test_the_snapshot_holds_every_step_that_is_planned_and_not_trained(store: Store, records: Any) -> None:
    store.apply([*records.opened(1, 2), records.leased(2, 1, 0), records.leased(3, 2, 0)], now=1.0)
    store.apply([*records.received("2-0", "3-0"), *records.scored("2-0", "3-0")], now=2.0)
    store.apply([records.planned(1, (2,), ("3-0",))], now=3.0)
    store.apply([records.planned(2, (1,), ("2-0",))], now=4.0)
    snapshot = store.read(read_snapshot)
    assert snapshot.planned == (
        StepRow(step=1, group_ids=(2,), rollout_ids=("3-0",)),
        StepRow(step=2, group_ids=(1,), rollout_ids=("2-0",)),
    )
    assert [group.group_id for group in snapshot.groups] == [1, 2] and snapshot.trained_steps == 0


def test_the_snapshot_holds_scorer_failures_of_open_groups(store: Store, records: Any) -> None:
    store.apply([*records.opened(1, 2), records.leased(2, 1, 0, 1), records.leased(3, 2, 0)], now=1.0)
    store.apply(records.received("2-0", "2-1", "3-0"), now=2.0)
    failed = RolloutsDropped(rollout_ids=("2-1", "3-0"), reason=DropReason.SCORER_FAILED)
    store.apply([failed, RolloutsDropped(rollout_ids=("2-0",), reason=DropReason.INVALID)], now=3.0)
    store.apply([GroupDropped(group_id=2, reason=DropReason.SCORER_FAILED), records.leased(4, 1, 1)], now=4.0)
    store.apply([RolloutsDropped(rollout_ids=("4-1",), reason=DropReason.SCORER_FAILED)], now=5.0)
    assert store.read(read_snapshot).scorer_failures == ((1, 1, 0), (1, 1, 0))


def test_payloads_are_read_back_unchanged(store: Store, records: Any) -> None:
    store.apply([*records.opened(4), records.leased(1, 4, 0, 1), *records.received("1-0", "1-1")], now=1.0)
    (stored,) = store.read(read_payloads, ["1-1"])
    expected = records.payload(3, 100)
    assert (stored.rollout_id, stored.group_id) == ("1-1", 4)
    assert stored.payload.completion_ids.tolist() == expected.completion_ids.tolist()
    assert stored.payload.behavior_logprobs.tolist() == expected.behavior_logprobs.tolist()
    assert (stored.payload.finish_reason, stored.payload.sampling_s) == (expected.finish_reason, 0.5)
    assert store.read(read_payloads, []) == []


def test_more_payloads_than_one_query_may_name_are_read_back(store: Store, records: Any) -> None:
    """Request 66,000 payloads: SQLite allows 32,766 parameters per statement (250,000 in some builds), PostgreSQL
    65,535.
    """
    store.apply([*records.opened(0), records.leased(1, 0, 0), *records.received("1-0")], now=1.0)
    asked = ["1-0", *(f"{lease_id}-0" for lease_id in range(2, 66_000))]
    assert [stored.rollout_id for stored in store.read(read_payloads, asked)] == ["1-0"]


def test_turns_are_found_by_their_groups() -> None:
    """Queries of turns must use the index of groups. SQLite does not know how many rows have a given state, so it might
    prefer an index that most rows of a long run match.
    """
    store = Store.open("sqlite://")
    statements: list[tuple[str, Any]] = []
    listen(store.engine, "before_cursor_execute", lambda _c, _k, sql, given, *_: statements.append((sql, given)))
    store.read(read_turns, {(group_id, 0) for group_id in range(5)})
    sql, given = statements[-1]
    with store.engine.connect() as connection:
        plan = " ".join(row.detail for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", given))
    assert "SEARCH rollouts USING INDEX ix_rollouts_group" in plan
    store.close()


def test_a_receipt_is_for_its_own_node(store: Store, records: Any) -> None:
    store.apply([*records.opened(0), records.leased(1, 0, 0, 1), *records.received("1-0")], now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("1-1",), reason=DropReason.STALE)], now=2.0)
    assert store.read(read_receipts, "a", ["1-0"])[0] == Receipt(rollout_id="1-0", state=ReceiptState.RECEIVED)
    assert store.read(read_receipts, "a", ["1-1"])[0] == Receipt(
        rollout_id="1-1", state=ReceiptState.DROPPED, drop_reason=DropReason.STALE
    )


@pytest.mark.parametrize(
    ("node_id", "asked"),
    [
        ("b", "1-0"),
        ("a", "1-7"),
        ("a", "01-0"),
        ("a", "1-00"),
        ("a", f"{10**40}-0"),
        ("a", f"1-{2**63}"),
        ("a", "1-3000000000"),
        ("a", f"1-{MAX_GROUP_SIZE}"),
        ("a", f"{2**63 - 1}-0"),
        ("a", f"{2**63}-0"),
    ],
)
def test_other_values_are_invalid(store: Store, records: Any, node_id: str, asked: str) -> None:
    store.apply([*records.opened(0), records.leased(1, 0, 0, 1)], now=1.0)
    assert store.read(read_receipts, node_id, [asked])[0] == Receipt(
        rollout_id=asked, state=ReceiptState.DROPPED, drop_reason=DropReason.INVALID
    )


def test_a_whole_message_of_receipts_is_answered_in_order(store: Store, records: Any) -> None:
    for lease_id, node_id in ((1, "a"), (2, "b"), (3, "a"), (4, "a")):
        leased = records.leased(lease_id, lease_id, *range(MAX_GROUP_SIZE), node_id=node_id)
        store.apply([*records.opened(lease_id), leased], now=1.0)
    store.apply(records.received("3-5"), now=2.0)
    asked = [f"{lease_id}-{index}" for index in reversed(range(MAX_BATCHED // 4)) for lease_id in (3, 1, 2, 9)]
    receipts = store.read(read_receipts, "a", asked)
    assert [receipt.rollout_id for receipt in receipts] == asked
    of_lease = {
        lease_id: {receipts[i].state for i in range(place, MAX_BATCHED, 4)} for place, lease_id in enumerate("3129")
    }
    assert of_lease["1"] == {ReceiptState.LEASED}
    assert of_lease["2"] == of_lease["9"] == {ReceiptState.DROPPED}
    assert [receipt.rollout_id for receipt in receipts if receipt.state is ReceiptState.RECEIVED] == ["3-5"]
    assert store.read(read_receipts, "a", []) == []
    assert store.read(read_receipts, "a", ["3-5", "3-5"]) == [store.read(read_receipts, "a", ["3-5"])[0]] * 2
