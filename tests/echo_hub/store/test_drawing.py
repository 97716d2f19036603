from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echo_hub.core.accounting.effects import RolloutsDropped, ScoreRecorded
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.store.drawing import read_draws
from echo_hub.store.store import Store
from echo_shared.records.rollout import DrawnSpan
from echo_shared.wire.messages import DropReason


def test_a_draw_has_its_groups_seed_and_its_node(store: Store, records: Any) -> None:
    store.apply([*records.opened(4), records.leased(1, 4, 0, 1, node_id="b", version=3)], now=1.0)
    spans = (
        DrawnSpan(node_id="a", policy_version=2, num_tokens=1),
        DrawnSpan(node_id="b", policy_version=3, num_tokens=1),
    )
    (first,) = records.received("1-0")
    store.apply([replace(first, payload=replace(first.payload, spans=spans)), *records.received("1-1")], now=2.0)
    one, other = store.read(read_draws, ["1-1", "7-7", "1-0"])
    assert (one.stored.rollout_id, one.index, one.turn, one.group_seed) == ("1-1", 1, 0, 2**64 - 5)
    assert one.stored.payload.spans == (DrawnSpan(node_id="b", policy_version=3, num_tokens=2),)
    assert (other.stored.rollout_id, other.stored.payload.spans, other.scorer_failures) == ("1-0", spans, 0)
    assert store.read(read_draws, []) == []


def test_a_turn_that_the_scorer_failed_on_is_drawn_with_another_seed(store: Store, records: Any) -> None:
    """Seeds depend on how often the scorer failed before on this turn of this index; other failures must not count."""
    store.apply([*records.opened(0), records.leased(1, 0, 0, 1), records.leased(2, 0, 0)], now=1.0)
    store.apply(records.received("1-0", "1-1", "2-0"), now=2.0)
    failed = RolloutsDropped(rollout_ids=("1-1", "2-0"), reason=DropReason.SCORER_FAILED)
    store.apply([failed, records.leased(3, 0, 1), records.leased(4, 0, 0)], now=3.0)
    store.apply([RolloutsDropped(rollout_ids=("4-0",), reason=DropReason.STALE)], now=4.0)
    store.apply([records.leased(5, 0, 0), *records.received("3-1", "5-0")], now=5.0)
    counts = {draw.stored.rollout_id: draw.scorer_failures for draw in store.read(read_draws, ["1-0", "3-1", "5-0"])}
    assert counts == {"1-0": 0, "3-1": 1, "5-0": 1}


@pytest.mark.parametrize("trained", [False, True])
def test_a_later_turn_comes_with_those_before_it_even_after_training(store: Store, records: Any, trained: bool) -> None:
    store.apply([*records.opened(0), records.leased(1, 0, 0), *records.received("1-0")], now=1.0)
    store.apply([ScoreRecorded(rollout_id="1-0", reward=None, observation_ids=np.array([8, 9], np.int32))], now=2.0)
    store.apply([records.leased(2, 0, 0, turn=1, version=1), *records.received("2-0")], now=3.0)
    if trained:
        ids = ("1-0", "2-0")
        planned, done = records.planned(1, (0,), ids), records.one_step(1, lease_id=9, group_id=9)[-2]
        store.apply([*records.scored("2-0"), planned, replace(done, rollout_ids=ids)], now=4.0)
    first, second = store.read(read_draws, ["1-0", "2-0"])
    assert (first.turn, second.turn) == (0, 1)
    assert [turn.observation_ids.tolist() for turn in second.stored.earlier_turns] == [[8, 9]]


def test_a_draw_of_an_evaluation_has_no_stored_seed(store: Store, records: Any) -> None:
    group_id = EvaluationGroup(policy_version=1, greedy=False, number=3).group_id
    store.apply([records.leased(1, group_id, 0), *records.received("1-0")], now=1.0)
    (draw,) = store.read(read_draws, ["1-0"])
    assert draw.group_seed is None


def test_dropped_rollouts_are_left_out(store: Store, records: Any) -> None:
    store.apply([*records.opened(0), records.leased(1, 0, 0, 1), *records.received("1-0", "1-1")], now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("1-0",), reason=DropReason.STALE)], now=2.0)
    assert [draw.stored.rollout_id for draw in store.read(read_draws, ["1-0", "1-1"])] == ["1-1"]
