from __future__ import annotations

import numpy as np

from echo_shared.messages import FinishReason
from echo_shared.rollout_table import Rollout, RolloutTable
from echo_shared.sampling import GroupRequest


def rollout(number: int, *, prompt: int = 3, max_tokens: int = 4, stop_ids: tuple[int, ...] = (9,)) -> Rollout:
    group = GroupRequest(
        lease_id=number,
        group_id=10 + number,
        indices=(0,),
        prompt_ids=np.zeros(prompt, np.int32),
        seed=0,
        policy_version=2,
        temperature=1.0 + number,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
    )
    return Rollout(group, number, 0.0)


def filled(*rollouts: Rollout) -> RolloutTable:
    table = RolloutTable()
    for row, one in enumerate(rollouts):
        u = np.linspace(0.0, 0.5, one.group.max_tokens) + row / 10
        table.put(row, one, u, 100 + row, -0.25 * (row + 1))
    return table


def test_inputs_are_the_last_token_its_place_and_the_next_uniform() -> None:
    table = filled(rollout(0, prompt=3), rollout(1, prompt=7, max_tokens=6))
    inputs, drawing = table.next_inputs()
    np.testing.assert_array_equal(inputs, [[100, 101], [3, 7]])
    np.testing.assert_allclose(drawing, [[0.5 / 3, 0.1 + 0.1], [1.0, 2.0]])
    assert table.longest() == 13


def test_rows_end_by_a_stop_token_or_at_their_limit() -> None:
    table = filled(rollout(0, max_tokens=3), rollout(1, stop_ids=()), rollout(2, stop_ids=(8, 9)))
    assert table.add(np.array([9, 9, 1]), np.array([-1.0, -2.0, -3.0]))[0].finish_reason is FinishReason.STOP
    assert table.free() == [0]
    table.close_gaps()
    finished = table.add(np.array([8, 5]), np.array([-4.0, -5.0]))
    assert [(one.index, one.completion_ids.tolist()) for one in finished] == [(2, [102, 1, 8])]
    assert finished[0].behavior_logprobs.tolist() == [-0.75, -3.0, -4.0]
    assert (finished[0].lease_id, finished[0].group_id, finished[0].policy_version) == (2, 12, 2)
    table.close_gaps()
    (last,) = table.add(np.array([6]), np.array([0.0]))
    assert (last.completion_ids.tolist(), last.finish_reason) == ([101, 9, 5, 6], FinishReason.LENGTH)


def test_the_last_rows_move_into_the_gaps() -> None:
    table = filled(*(rollout(number, prompt=1 + number) for number in range(5)))
    table.free_lease(1)
    table.free_lease(3)
    assert table.free() == [1, 3]
    assert table.close_gaps() == ([4], [1])
    inputs, drawing = table.next_inputs()
    np.testing.assert_array_equal(inputs, [[100, 104, 102], [1, 5, 3]])
    np.testing.assert_array_equal(drawing[1], [1.0, 5.0, 3.0])
    assert table.close_gaps() == ([], [])


def test_what_is_free_counts_for_nothing() -> None:
    table = filled(rollout(0, prompt=50), rollout(1))
    table.free_lease(0)
    assert table.longest() == 7
    table.put(0, rollout(5, max_tokens=40, stop_ids=(1, 2, 3)), np.zeros(40), 7, 0.0)
    assert (len(table), table.free(), table.longest()) == (2, [], 43)
    assert RolloutTable().longest() == 0
