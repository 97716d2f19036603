from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from echo_hub.core.effects import GroupDropped, RolloutsDropped, StepTrained, VersionRecorded
from echo_hub.store.store import Store
from echo_hub.store.writing import key_of
from echo_shared.errors import LocalProtocolError, StorageError
from echo_shared.messages import DropReason, ReceiptState


def test_key_of_a_rollout() -> None:
    assert key_of("12-3") == (12, 3)


def test_one_turn_may_hold_a_rollouts_whole_life(store: Store, records: Any) -> None:
    store.apply(records.one_step(1, lease_id=5, group_id=0), now=1.0)
    assert store.accounting().by_state == {ReceiptState.TRAINED: 2}
    assert store.receipt("a", "5-1").state is ReceiptState.TRAINED


def test_records_of_one_kind_may_be_many(store: Store, records: Any) -> None:
    leases = [records.leased(lease, lease, *range(8)) for lease in range(64)]
    store.apply([*records.opened(*range(64)), *leases], now=1.0)
    ids = [f"{lease}-{index}" for lease in range(64) for index in range(8)]
    store.apply(records.received(*ids), now=2.0)
    assert store.accounting().by_state == {ReceiptState.RECEIVED: 512}
    assert [row.rollout_id for row in store.load_payloads(ids)] == ids


def test_a_batch_comes_back_in_order_and_exactly(store: Store, records: Any) -> None:
    store.apply([*records.opened(0, 1), records.leased(1, 0, 0, 1), records.leased(2, 1, 1, version=3)], now=1.0)
    store.apply([records.leased(3, 1, 0, node_id="b", version=4)], now=1.0)
    ids = ("1-0", "1-1", "3-0", "2-1")
    store.apply([*records.received(*ids), *records.verified(*ids), records.planned(1, (0, 1), ids)], now=2.0)
    first, second = store.load_batch(1)
    assert (first.group_id, first.seed, second.group_id, second.seed) == (0, 2**64 - 1, 1, 2**64 - 2)
    assert [rollout.rollout_id for rollout in (*first.rollouts, *second.rollouts)] == list(ids)
    last = second.rollouts[1]
    assert (last.node_id, last.policy_version, last.reward) == ("a", 3, 3.0)
    assert last.completion_ids.dtype == np.int32 and last.completion_ids.tolist() == [300, 301, 302, 303, 304]
    assert last.behavior_logprobs.dtype == np.float32 and last.behavior_logprobs[-1] == -0.625


@pytest.mark.parametrize("final", ["trained", "dropped"])
def test_a_final_state_never_changes_and_a_turn_is_all_or_nothing(store: Store, records: Any, final: str) -> None:
    if final == "trained":
        store.apply(records.one_step(1, lease_id=1, group_id=0), now=1.0)
    else:
        store.apply([*records.opened(0), records.leased(1, 0, 0, 1)], now=1.0)
        store.apply([RolloutsDropped(rollout_ids=("1-0", "1-1"), reason=DropReason.EXPIRED)], now=1.0)
    before = store.accounting()
    for late in (
        records.received("1-0"),
        records.verified("1-0"),
        [RolloutsDropped(rollout_ids=("1-0",), reason=DropReason.INVALID)],
        [RolloutsDropped(rollout_ids=("9-9",), reason=DropReason.INVALID)],
        [StepTrained(step=1, rollout_ids=("1-0",), metrics={}, trained_at=1.0)],
    ):
        with pytest.raises(LocalProtocolError, match=r"nothing of (them|this turn) is written"):
            store.apply([*records.opened(7), *late], now=2.0)
    assert store.accounting() == before
    assert store.snapshot().next_group_id == 1


def test_a_step_that_was_not_planned_cannot_be_trained(store: Store, records: Any) -> None:
    with pytest.raises(LocalProtocolError, match="not planned"):
        store.apply([StepTrained(step=3, rollout_ids=(), metrics={}, trained_at=1.0)], now=1.0)


def test_a_dropped_rollout_keeps_its_receipt_and_loses_its_tokens(store: Store, records: Any) -> None:
    store.apply([*records.opened(0), records.leased(1, 0, 0, 1), *records.received("1-0", "1-1")], now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("1-0",), reason=DropReason.INVALID, detail="not drawn")], now=2.0)
    assert [row.rollout_id for row in store.load_payloads(["1-0", "1-1"])] == ["1-1"]
    receipt = store.receipt("a", "1-0")
    assert (receipt.state, receipt.drop_reason) == (ReceiptState.DROPPED, DropReason.INVALID)


def test_a_dropped_group_is_not_taken_up_again(store: Store, records: Any) -> None:
    store.apply([*records.opened(0, 1), GroupDropped(group_id=0, reason=DropReason.STALE)], now=1.0)
    assert [group.group_id for group in store.snapshot().groups] == [1]
    assert store.snapshot().next_group_id == 2


def test_a_version_that_is_published_twice_keeps_its_first_time(store: Store) -> None:
    store.apply([VersionRecorded(policy_version=3, published_at=1.0)], now=1.0)
    store.apply([VersionRecorded(policy_version=3, published_at=2.0)], now=2.0)
    assert [version.published_at for version in store.versions_history(newest=9)] == [1.0]


def test_versions_may_be_as_large_as_messages_allow(store: Store, records: Any) -> None:
    store.apply([*records.opened(0), records.leased(1, 0, 0, version=2**31)], now=1.0)
    store.apply([VersionRecorded(policy_version=2**31, published_at=1.0)], now=1.0)
    store.record_evaluation(policy_version=2**31, accuracy=0.5, num_problems=2, now=1.0)
    assert store.snapshot().published_version == store.snapshot().rollouts[0].policy_version == 2**31
    assert store.evaluated_versions() == {2**31}


def test_pruning_deletes_tokens_and_nothing_else(store: Store, records: Any) -> None:
    for step in (1, 2, 3):
        store.apply(records.one_step(step, lease_id=step, group_id=step - 1), now=1.0)
    store.prune(2)
    store.prune(2)
    assert store.snapshot().replayable == {3}
    assert store.accounting().trained == 6
    assert len(store.load_batch(3)) == 1
    for step, said in ((2, "pruned"), (4, "never planned")):
        with pytest.raises(StorageError, match=f"(?s)not in the store.*{said}"):
            store.load_batch(step)
