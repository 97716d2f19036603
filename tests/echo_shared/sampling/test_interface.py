"""A request for rollouts may contain a prefix (tokens drawn before) for each rollout. An impossible prefix is refused
with the reason.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from echo_shared.errors import BackendError
from echo_shared.sampling.interface import BAD_PREFIX, GroupRequest, Prefix, check_prefixes


def prefix(index: int, *ids: int, logprobs: int | None = None) -> Prefix:
    count = len(ids) if logprobs is None else logprobs
    return Prefix(index=index, ids=np.array(ids, np.int32), logprobs=np.zeros(count, np.float32))


def request(*prefixes: Prefix, **changes: Any) -> GroupRequest:
    values: dict[str, Any] = {
        "lease_id": 1,
        "group_id": 2,
        "indices": (0, 3, 5),
        "prompt_ids": np.array([7, 8], np.int32),
        "seed": 9,
        "policy_version": 0,
        "temperature": 1.0,
        "max_tokens": 4,
        "stop_ids": (1, 2),
    }
    return GroupRequest(**{**values, "prefixes": prefixes, **changes})


def starts(one: GroupRequest) -> list[tuple[list[int], tuple[int, ...]]]:
    return [(ids.tolist(), indices) for ids, indices in one.starts()]


def test_fresh_rollouts_begin_with_the_prompt_and_others_with_their_prefix_too() -> None:
    assert starts(request()) == [([7, 8], (0, 3, 5))]
    some = request(prefix(3, 4, 6), prefix(0, 5))
    assert some.fresh == (5,)
    assert starts(some) == [([7, 8], (5,)), ([7, 8, 4, 6], (3,)), ([7, 8, 5], (0,))]
    assert starts(request(prefix(3, 4), indices=(3,))) == [([7, 8, 4], (3,))]
    assert all(ids.dtype == np.int32 for ids, _ in some.starts())


def test_the_beginning_of_an_unfinished_completion_is_fine() -> None:
    check_prefixes(request(prefix(0, 5), prefix(3, 0, 9, 9)), vocab_size=10)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ((prefix(1, 5),), "index 1: its index is not in the request"),
        ((prefix(3, 5), prefix(3, 6)), "has two prefixes"),
        ((prefix(3),), "0 tokens and 0 log-probabilities"),
        ((prefix(3, 5, 6, logprobs=1),), "2 tokens and 1 log-probabilities"),
        ((prefix(3, 5, 5, 5, 5),), "it is already complete: 4 tokens of 4"),
        ((prefix(0, 5), prefix(3, 5, 2)), "index 3: it is already complete: it holds a stop token"),
        ((prefix(3, 10),), "not in the vocabulary of 10"),
        ((prefix(3, -1),), "not in the vocabulary of 10"),
    ],
)
def test_an_impossible_prefix_is_refused_with_the_reason(wrong: tuple[Prefix, ...], words: str) -> None:
    with pytest.raises(BackendError, match=words) as caught:
        check_prefixes(request(*wrong), vocab_size=10)
    assert caught.value.code == BAD_PREFIX
