from __future__ import annotations

from typing import Any

from echo_hub.core.accounting.effects import RolloutsDropped
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.store.recent_work import IN_FLIGHT, BatchAges, read_batch_ages, read_lengths
from echo_hub.store.store import Store
from echo_shared.wire.messages import DropReason


def test_lengths_of_received_rollouts_are_counted_by_outcome(store: Store, records: Any) -> None:
    store.apply(records.one_step(1, lease_id=1, group_id=0), now=5.0)
    evaluation = EvaluationGroup(policy_version=1, greedy=True, number=0).group_id
    store.apply([*records.opened(7, evaluation), records.leased(2, 7, 0), records.leased(3, 7, 1)], now=8.0)
    store.apply([records.leased(4, 7, 2), records.leased(5, evaluation, 0)], now=8.0)
    store.apply(records.received("2-0", "3-1", "5-0"), now=9.0)
    store.apply([RolloutsDropped(rollout_ids=("2-0",), reason=DropReason.STALE)], now=10.0)
    found = store.read(read_lengths, 99)
    came = sorted(length.outcome for length in found for _ in range(length.rollouts))
    assert came == [IN_FLIGHT, "stale", "trained", "trained"]
    assert sum(length.num_tokens * length.rollouts for length in found if length.outcome == "trained") == 5
    (only,) = store.read(read_lengths, 3)
    assert only.rollouts == 1, "three are leased, but one is an evaluation's and one is in progress"


def test_only_trained_steps_give_their_groups_ages(store: Store, records: Any) -> None:
    for step in (1, 2, 3):
        store.apply(records.one_step(step, lease_id=step, group_id=step), now=5.0)
    newest, before = store.read(read_batch_ages, 2)
    assert (newest.step, before.step) == (3, 2)
    assert isinstance(newest, BatchAges) and all(age >= 0 for age in newest.staleness) and newest.staleness
