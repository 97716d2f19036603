"""The slot table's columns grow and are reused without one rollout seeing another's."""

from __future__ import annotations

import dataclasses

import numpy as np

from echo_node.backends.slots import SlotTable
from echo_shared import draws
from echo_shared.messages import FinishReason
from echo_shared.sampling import GroupRequest

REQUEST = GroupRequest(
    lease_id=1,
    group_id=1,
    indices=(0,),
    prompt_ids=np.array([5, 6, 7], np.int32),
    seed=11,
    policy_version=0,
    temperature=0.5,
    max_tokens=3,
    stop_ids=(9,),
)


def record(table: SlotTable, slots: list[int], tokens: list[int]) -> list[int]:
    return list(table.record(np.array(slots), np.array(tokens), np.array([-1.0] * len(slots))))


def test_stop_token_and_length_end_a_rollout() -> None:
    table = SlotTable(2)
    table.start(np.array([0]), REQUEST, (0,))
    table.start(np.array([1]), REQUEST, (1,))
    np.testing.assert_array_equal(table.next_uniforms(np.array([1])), draws.uniforms(11, 1, 3)[:1])
    assert record(table, [0, 1], [3, 4]) == []
    assert table.position.tolist() == [3, 3]
    assert table.token.tolist() == [3, 4]
    assert record(table, [0, 1], [9, 4]) == [0]
    ids, logprobs, reason = table.take(0)
    assert (ids.tolist(), logprobs.tolist(), reason) == ([3, 9], [-1.0, -1.0], FinishReason.STOP)
    np.testing.assert_array_equal(table.next_uniforms(np.array([1])), draws.uniforms(11, 1, 3)[2:])
    assert record(table, [1], [4]) == [1]
    assert table.take(1)[2] is FinishReason.LENGTH
    assert not table.active.any()


def test_a_long_rollout_with_many_stops_makes_room() -> None:
    table = SlotTable(2)
    table.start(np.array([0]), REQUEST, (0,))
    record(table, [0], [3])
    table.start(np.array([1]), dataclasses.replace(REQUEST, max_tokens=500, stop_ids=(1, 2, 3)), (0,))
    assert record(table, [0, 1], [9, 9]) == [0]
    assert table.take(0)[0].tolist() == [3, 9]
    for _ in range(498):
        assert record(table, [1], [9]) == []
    assert record(table, [1], [3]) == [1]
    assert len(table.take(1)[0]) == 500


def test_a_reused_slot_forgets_the_stops_before() -> None:
    table = SlotTable(1)
    table.start(np.array([0]), dataclasses.replace(REQUEST, stop_ids=(1, 2, 3)), (0,))
    table.drop(0)
    table.start(np.array([0]), REQUEST, (0,))
    assert record(table, [0], [2]) == []


def test_a_moved_rollout_goes_on() -> None:
    table = SlotTable(3)
    table.start(np.array([2]), dataclasses.replace(REQUEST, stop_ids=(8, 9)), (4,))
    record(table, [2], [5])
    table.move(2, 0)
    assert table.active.tolist() == [True, False, False]
    assert (table.token[0], table.position[0], table.temperature[0]) == (5, 3, 0.5)
    np.testing.assert_array_equal(table.next_uniforms(np.array([0])), draws.uniforms(11, 4, 3)[1:2])
    assert record(table, [0], [8]) == [0]
    ids, _, reason = table.take(0)
    assert (ids.tolist(), reason) == ([5, 8], FinishReason.STOP)
