from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from echo_hub.learner.drawing import Drawing, _fingerprint
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.torch_cache import columns_for, row_bytes
from echo_shared.sampling.torch_draws import draw

LENGTH = 24


@pytest.fixture
def policy(settings: LearnerSettings) -> Policy:
    return Policy.load(settings)


def requests(*prompts: int) -> list[GroupRequest]:
    """Return requests for groups of four with prompts of these lengths. A completion has `LENGTH` tokens unless it
    happens to sample the stop token earlier.
    """
    rng = np.random.default_rng(0)
    return [
        GroupRequest(
            lease_id=1,
            group_id=number,
            indices=(0, 1, 2, 3),
            prompt_ids=rng.integers(2, 40, length).astype(np.int32),
            seed=number,
            policy_version=0,
            temperature=1.0,
            max_tokens=LENGTH,
            stop_ids=(1,),
        )
        for number, length in enumerate(prompts)
    ]


@contextmanager
def rows_in(policy: Policy, *, most: int = 10_000) -> Iterator[list[int]]:
    """Yield a list that collects the number of rows of each forward pass. The device has memory for `most` rows."""
    seen: list[int] = []

    def before(model: Any, args: Any, kwargs: Any) -> None:
        seen.append(len(kwargs["input_ids"]))
        if seen[-1] > most:
            raise torch.OutOfMemoryError(f"{seen[-1]} rows")

    hook = policy.model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def drawn(rollouts: Iterator[FinishedRollout]) -> dict[tuple[int, int], list[int]]:
    found = [((one.group_id, one.index), one.completion_ids.tolist()) for one in rollouts]
    assert len(dict(found)) == len(found), "none twice"
    return dict(found)


def test_all_groups_are_sampled_in_one_batch_for_any_micro_batch_size(policy: Policy) -> None:
    with rows_in(policy) as rows:
        found = drawn(Drawing(policy, kv_cache_bytes=0).draw(requests(3, 5, 4, 6), draw))
    assert set(found) == {(group, index) for group in range(4) for index in range(4)}
    assert max(rows) == 16 and len(rows) <= 1 + LENGTH


def test_a_small_budget_of_keys_and_values_makes_the_batch_narrower_and_draws_the_same(policy: Policy) -> None:
    whole = drawn(Drawing(policy, kv_cache_bytes=0).draw(requests(3, 5, 4, 6), draw))
    room = 3 * columns_for(6 + LENGTH) * row_bytes(policy.model).per_token
    with rows_in(policy) as rows:
        assert drawn(Drawing(policy, kv_cache_bytes=room).draw(requests(3, 5, 4, 6), draw)) == whole
    assert max(rows) == 3 or max(rows) == 4, "a prefill of all four prompts"
    assert len(rows) > 2 * LENGTH


def test_a_batch_too_large_for_memory_is_halved(policy: Policy) -> None:
    whole = drawn(Drawing(policy, kv_cache_bytes=0).draw(requests(3, 5, 4, 6), draw))
    drawing = Drawing(policy, kv_cache_bytes=0)
    with rows_in(policy, most=5) as rows:
        assert drawn(drawing.draw(requests(3, 5, 4, 6), draw)) == whole
        assert drawing.rows == 4 and {8, 16} <= set(rows)
        rows.clear()
        assert drawn(drawing.draw(requests(3, 5, 4, 6), draw)) == whole
        assert max(rows) <= 4


def test_finished_rollouts_are_kept_if_memory_runs_out(policy: Policy) -> None:
    """Prompts that are too large for memory must not cost other groups their finished rollouts."""
    one, other = requests(3, 60)
    drawing = Drawing(policy, kv_cache_bytes=0)
    found: list[tuple[int, int]] = []

    def too_long(model: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] == 60 and len(found) < 4:
            raise torch.OutOfMemoryError("60 tokens")

    drawing.rows = 4
    hook = policy.model.register_forward_pre_hook(too_long, with_kwargs=True)
    for rollout in drawing.draw([one, other], draw):
        found.append((rollout.group_id, rollout.index))
    hook.remove()
    assert sorted(found) == [(group, index) for group in range(2) for index in range(4)]


def test_too_little_memory_for_one_rollout_and_other_errors_are_reported(policy: Policy) -> None:
    with rows_in(policy, most=0), pytest.raises(torch.OutOfMemoryError, match="1 rows"):
        drawn(Drawing(policy, kv_cache_bytes=0).draw(requests(3, 5), draw))

    def broken(model: Any, args: Any, kwargs: Any) -> None:
        raise RuntimeError("device-side assert")

    hook = policy.model.register_forward_pre_hook(broken, with_kwargs=True)
    with pytest.raises(RuntimeError, match="device-side assert"):
        drawn(Drawing(policy, kv_cache_bytes=0).draw(requests(3), draw))
    hook.remove()


def _next_turn(first: list[GroupRequest], said: dict[tuple[int, int], list[int]]) -> list[GroupRequest]:
    """Return a request for the next turn of each rollout: its prompt is all tokens so far and three more."""
    return [
        dataclasses.replace(
            one,
            indices=(index,),
            prompt_ids=np.concatenate([one.prompt_ids, np.array([*said[one.group_id, index], 7, 8, 9], np.int32)]),
            seed=100 + one.group_id,
        )
        for one in first
        for index in one.indices
    ]


def _tokens_of(policy: Policy, run: Callable[[], Any]) -> tuple[Any, int]:
    """Return the call's result, and the number of tokens that the model computed for it, padding included."""
    computed = 0

    def before(model: Any, args: Any, kwargs: Any) -> None:
        nonlocal computed
        computed += kwargs["input_ids"].numel()

    hook = policy.model.register_forward_pre_hook(before, with_kwargs=True)
    found = run()
    hook.remove()
    return found, computed


def test_a_next_turn_continues_from_the_last_by_the_same_weights_alone(policy: Policy) -> None:
    def turn(drawing: Drawing, groups: list[GroupRequest]) -> tuple[dict[tuple[int, int], list[int]], int]:
        found: tuple[dict[tuple[int, int], list[int]], int] = _tokens_of(
            policy, lambda: drawn(drawing.draw(groups, draw))
        )
        return found

    first = requests(3, 5, 4, 6)
    multi, anew = Drawing(policy, kv_cache_bytes=0, multi_turn=True), Drawing(policy, kv_cache_bytes=0)
    second = _next_turn(first, turn(multi, first)[0])
    expected, all_tokens = turn(anew, second)
    found, tokens = turn(multi, second)
    assert found == expected and tokens < 0.7 * all_tokens
    other = {name: torch.randn_like(weight) for name, weight in policy.published().items()}
    with policy.holding(other):
        expected, all_tokens = turn(anew, second)
        assert turn(multi, second) == (expected, all_tokens), "nothing of an older policy is kept"
    with policy.model.disable_adapter():
        expected, all_tokens = turn(anew, second)
        assert turn(multi, second) == (expected, all_tokens), "an adapter's cache is not used for the base"


def test_cached_samples_are_dropped_before_a_step(policy: Policy) -> None:
    drawing = Drawing(policy, kv_cache_bytes=0, multi_turn=True)
    first = requests(3, 5)
    second = _next_turn(first, drawn(drawing.draw(first, draw)))
    _, kept_tokens = _tokens_of(policy, lambda: drawn(drawing.draw(second, draw)))
    drawing.forget()
    _, all_tokens = _tokens_of(policy, lambda: drawn(drawing.draw(second, draw)))
    assert all_tokens > 1.3 * kept_tokens


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("base_bits", [0, 4])
def test_a_base_and_its_adapter_have_separate_caches(
    base_bits: int, make_settings: Callable[..., LearnerSettings]
) -> None:
    if base_bits:
        pytest.importorskip("bitsandbytes")
    policy = Policy.load(make_settings(learner={"base_bits": base_bits}))
    own = _fingerprint(policy)
    with policy.model.disable_adapter():
        assert _fingerprint(policy) != own
    with policy.holding({name: weight + 1 for name, weight in policy.published().items()}):
        assert _fingerprint(policy) != own
    assert _fingerprint(policy) == own
