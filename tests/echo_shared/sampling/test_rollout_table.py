"""Rows of the table are filled, extended, ended, moved and reused, without mixing up rollouts."""

from __future__ import annotations

import dataclasses

import numpy as np

from echo_shared.sampling import draws
from echo_shared.sampling.interface import FinishedRollout, GroupRequest, Prefix
from echo_shared.sampling.rollout_table import RolloutTable
from echo_shared.wire.messages import FinishReason


def group(
    number: int, *, prompt: int = 3, max_tokens: int = 4, stop_ids: tuple[int, ...] = (9,), seed: int = 11
) -> GroupRequest:
    return GroupRequest(
        lease_id=number,
        group_id=10 + number,
        indices=(0,),
        prompt_ids=np.arange(prompt, dtype=np.int32) + 5,
        seed=seed,
        policy_version=2,
        temperature=1.0 + number,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
    )


def record(
    table: RolloutTable, rows: list[int], tokens: list[int], logprob: float = -1.0
) -> dict[int, FinishedRollout]:
    return table.record(np.array(rows), np.array(tokens), np.full(len(rows), logprob), now=3.5)


def filled(*groups: GroupRequest) -> RolloutTable:
    """Return a table with one rollout of each group; each rollout has sampled the token 100 + its row."""
    table = RolloutTable()
    for row, one in enumerate(groups):
        table.start([row], one, [row], started=1.0)
        record(table, [row], [100 + row], -0.25 * (row + 1))
    return table


def test_a_rollout_starts_at_the_last_token_of_its_prompt() -> None:
    table = RolloutTable()
    table.start((0, 1), group(1, prompt=3), (4, 2), started=0.0)
    tokens, positions = table.next_inputs(np.arange(2))
    assert (tokens.tolist(), positions.tolist()) == ([7, 7], [2, 2])
    u, temperatures = table.next_draws(np.arange(2))
    assert u.tolist() == [draws.uniforms(11, 4, 1)[0], draws.uniforms(11, 2, 1)[0]]
    assert temperatures.tolist() == [2.0, 2.0]


def begun(number: int, *prefixes: tuple[int, list[int]]) -> GroupRequest:
    """Return a group whose rollouts have these prefixes, by index; each prefix token has probability 1/e."""
    given = tuple(
        Prefix(index=index, ids=np.array(ids, np.int32), logprobs=np.full(len(ids), -1, np.float32))
        for index, ids in prefixes
    )
    return dataclasses.replace(group(number, max_tokens=6), indices=(4, 2, 7), prefixes=given)


def test_a_rollout_with_a_prefix_starts_after_it() -> None:
    table = RolloutTable()
    table.start((1, 0), begun(1, (2, [20, 21]), (7, [30])), (4, 2), started=0.0)
    tokens, positions = table.next_inputs(np.arange(2))
    assert (tokens.tolist(), positions.tolist()) == ([21, 7], [4, 2])
    u, _ = table.next_draws(np.arange(2))
    assert u.tolist() == [draws.uniforms(11, 2, 3)[2], draws.uniforms(11, 4, 1)[0]]
    assert table.longest() == 9
    record(table, [0, 1], [22, 40], -0.5)
    ended = record(table, [0, 1], [9, 9], -0.5)
    assert [(one.completion_ids.tolist(), one.num_given) for one in ended.values()] == [
        ([20, 21, 22, 9], 2),
        ([40, 9], 0),
    ]
    assert ended[0].behavior_logprobs.tolist() == [-1, -1, -0.5, -0.5]


def test_a_prefix_counts_towards_the_limit() -> None:
    table = RolloutTable()
    table.start([0], begun(0, (2, [20] * 4)), [2], started=0.0)
    assert record(table, [0], [5]) == {}
    assert record(table, [0], [5])[0].finish_reason is FinishReason.LENGTH


def shown(table: RolloutTable) -> list[tuple[int, int, int, list[int], list[float]]]:
    return [(one.lease_id, one.index, one.start, one.ids.tolist(), one.logprobs.tolist()) for one in table.news()]


def test_news_is_reported_once_even_if_its_row_moves() -> None:
    table = filled(group(0), group(1, max_tokens=9))
    table.start([2], begun(2, (2, [20, 21])), [2], started=0.0)
    assert shown(table) == [(0, 0, 0, [100], [-0.25]), (1, 1, 0, [101], [-0.5])]
    assert table.news() == []
    record(table, [1, 2], [5, 6])
    table.drop([0])
    assert table.close_gaps() == ([2], [0])
    assert shown(table) == [(2, 2, 2, [6], [-1.0]), (1, 1, 1, [5], [-1.0])]
    record(table, [0, 1], [9, 7])
    assert shown(table) == [(1, 1, 2, [7], [-1.0])], "finished rollouts are returned whole, not as news"
    record(table, [1], [7])
    table.drop([1])
    assert table.news() == []
    assert RolloutTable().news() == []


def test_inputs_are_the_last_token_its_position_and_the_next_uniform() -> None:
    table = filled(group(0, prompt=3), group(1, prompt=7, max_tokens=6))
    tokens, positions = table.next_inputs(np.array([1, 0]))
    assert (tokens.tolist(), positions.tolist()) == ([101, 100], [7, 3])
    u, temperatures = table.next_draws(np.array([1, 0]))
    assert u.tolist() == [draws.uniforms(11, 1, 2)[1], draws.uniforms(11, 0, 2)[1]]
    assert temperatures.tolist() == [2.0, 1.0]
    assert table.longest() == 13


def test_rows_end_by_a_stop_token_or_at_their_limit() -> None:
    table = filled(group(0, max_tokens=3), group(1, stop_ids=()), group(2, stop_ids=(8, 9)))
    (first,) = record(table, [0, 1, 2], [9, 9, 1]).values()
    assert (first.index, first.finish_reason, first.sampling_s) == (0, FinishReason.STOP, 2.5)
    assert table.free() == [0]
    assert record(table, [1], [5]) == {}
    (third,) = record(table, [2], [8]).values()
    assert third.completion_ids.tolist() == [102, 1, 8]
    assert third.behavior_logprobs.tolist() == [-0.75, -1.0, -1.0]
    assert (third.lease_id, third.group_id, third.policy_version) == (2, 12, 2)
    assert third.finish_reason is FinishReason.STOP
    ((row, last),) = record(table, [1], [6]).items()
    assert (row, last.completion_ids.tolist(), last.finish_reason) == (1, [101, 9, 5, 6], FinishReason.LENGTH)


def test_the_last_rows_move_into_the_gaps() -> None:
    table = filled(*(group(number, prompt=1 + number) for number in range(5)))
    table.drop(table.rows_of(1) + table.rows_of(3))
    assert table.free() == [1, 3]
    assert table.close_gaps() == ([4], [1])
    tokens, positions = table.next_inputs(np.arange(3))
    assert (tokens.tolist(), positions.tolist()) == ([100, 104, 102], [1, 5, 3])
    assert table.next_draws(np.arange(3))[1].tolist() == [1.0, 5.0, 3.0]
    assert table.close_gaps() == ([], [])


def test_a_moved_rollout_continues() -> None:
    table = RolloutTable()
    table.start([2], group(0, stop_ids=(8, 9)), [4], started=0.0)
    assert (len(table), table.free()) == (3, [0, 1])
    record(table, [2], [5])
    assert table.close_gaps() == ([2], [0])
    assert len(table) == 1
    assert table.next_draws(np.array([0]))[0].tolist() == [draws.uniforms(11, 4, 2)[1]]
    ended = record(table, [0], [8])[0]
    assert (ended.index, ended.completion_ids.tolist(), ended.finish_reason) == (4, [5, 8], FinishReason.STOP)


def test_free_rows_at_the_end_are_no_gaps_and_go() -> None:
    table = filled(group(0), group(1), group(2))
    table.drop([1, 2])
    assert table.close_gaps() == ([], [])
    assert len(table) == 1


def test_free_rows_do_not_count() -> None:
    table = filled(group(0, prompt=50), group(1))
    table.drop(table.rows_of(0))
    assert table.longest() == 7
    table.start([0], group(5, max_tokens=40, stop_ids=(1, 2, 3)), [0], started=0.0)
    assert (len(table), table.free(), table.longest()) == (2, [], 43)
    assert RolloutTable().longest() == 0


def test_a_long_rollout_with_many_stops_makes_room() -> None:
    table = filled(group(0))
    table.start([1], group(1, max_tokens=500, stop_ids=(1, 2, 3)), [0], started=0.0)
    assert list(record(table, [0, 1], [9, 9])) == [0]
    for _ in range(498):
        assert record(table, [1], [9]) == {}
    assert len(record(table, [1], [3])[1].completion_ids) == 500


def test_a_reused_row_forgets_the_stops_and_the_tokens_before() -> None:
    table = filled(group(0, stop_ids=(1, 2, 3)))
    table.drop([0])
    table.start([0], group(1), [0], started=0.0)
    assert record(table, [0], [2]) == {}
    assert record(table, [0], [9])[0].completion_ids.tolist() == [2, 9]


def test_nothing_to_note_is_noted() -> None:
    assert RolloutTable().record(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), now=0.0) == {}
