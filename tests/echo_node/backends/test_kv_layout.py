"""A layout of the key-value cache holds the largest number of rollouts that fit, and each rollout up to its maximum
length.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.backends.kv_layout import KvLayout, KvPlanner
from echo_shared.errors import BackendError
from echo_shared.sampling.interface import GroupRequest


def request(prompt: int, max_tokens: int, group_size: int = 8) -> GroupRequest:
    return GroupRequest(
        lease_id=1,
        group_id=1,
        indices=tuple(range(group_size)),
        prompt_ids=np.zeros(prompt, np.int32),
        seed=1,
        policy_version=0,
        temperature=1.0,
        max_tokens=max_tokens,
        stop_ids=(),
    )


def planner(*, width: int = 64, cells: int = 10**9) -> KvPlanner:
    return KvPlanner(width=width, max_positions=40_960, vocab_size=10, affordable_cells=cells)


def test_long_rollouts_run_all_at_once_where_memory_allows() -> None:
    assert planner().plan(request(256, 2_048)) == KvLayout(sequences=64, cells=2_304, unified=False)
    assert planner(cells=20 * 2_304 + 5).plan(request(256, 2_048)).sequences == 20


@given(st.integers(1, 256), st.integers(1, 100_000), st.integers(1, 5_000), st.integers(1, 5_000), st.integers(1, 64))
def test_an_accepted_layout_fits_its_rollouts_and_memory(
    width: int, blocks: int, prompt: int, max_tokens: int, group_size: int
) -> None:
    plans = planner(width=width, cells=256 * blocks)
    asked = request(prompt, max_tokens, group_size)
    try:
        plans.check(asked)
    except BackendError as error:
        assert error.code == "too_long"
        assert prompt + max_tokens - 1 > min(256 * blocks, 40_960)
        return
    layout = plans.plan(asked)
    assert 1 <= layout.sequences <= width
    assert layout.cells >= prompt + max_tokens - 1
    assert layout.sequences * layout.cells <= 256 * blocks
    assert layout.sequences == width or (layout.sequences + 1) * layout.cells > 256 * blocks
    assert layout.serves(layout)


def test_few_cells_are_shared_and_many_are_not() -> None:
    assert planner(width=8).plan(request(20, 20)).unified
    assert not planner(width=64).plan(request(20, 400)).unified
    assert not planner(width=8).plan(request(500, 20, group_size=1)).unified
    assert planner(width=16).plan(request(500, 20, group_size=16)).unified


def test_a_layout_serves_smaller_requests_of_its_arrangement() -> None:
    layout = KvLayout(sequences=8, cells=512, unified=False)
    assert layout.serves(KvLayout(sequences=8, cells=256, unified=False))
    assert not layout.serves(KvLayout(sequences=9, cells=256, unified=False))
    assert not layout.serves(KvLayout(sequences=8, cells=768, unified=False))
    assert not layout.serves(KvLayout(sequences=8, cells=512, unified=True))


def test_a_request_too_large_for_memory_names_both_limits() -> None:
    with pytest.raises(BackendError) as caught:
        planner(cells=256).check(request(200, 58))
    assert caught.value.code == "too_long"
    assert caught.value.got is not None
    assert "256" in caught.value.got
    assert "40960" in caught.value.got


def test_states_take_memory_of_each_sequence_and_of_the_one_that_keeps_the_prompt() -> None:
    plans = KvPlanner(width=64, max_positions=40_960, vocab_size=10, affordable_cells=20 * 512, state_cells=256)
    layout = plans.plan(request(100, 100))
    assert (layout.sequences, layout.all_sequences, layout.cells) == (19, 20, 256)
    assert plans.affordable_length == 10 * 512 - 256
    with pytest.raises(BackendError, match="memory for keys and values"):
        plans.check(request(5_000, 100))


def test_sequences_stay_apart_if_the_model_needs_it() -> None:
    plans = KvPlanner(width=8, max_positions=40_960, vocab_size=10, affordable_cells=10**9, may_unify=False)
    assert not plans.plan(request(20, 20)).unified
