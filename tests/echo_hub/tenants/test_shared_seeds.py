from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.tenants.requests import SamplingWish
from echo_hub.tenants.shared_seeds import MOST_INDICES, SharedSeeds, equality_key

PROMPT = np.array([1, 2, 3], np.int32)
WISH = SamplingWish(max_tokens=9, stop_ids=frozenset({1}), stop_strings=("a",))


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.integers(1, 40)), max_size=60))
def test_no_draw_is_given_twice(asked: list[tuple[bytes, int]]) -> None:
    seeds, given_out = SharedSeeds(), set()
    for number, (key, num_samples) in enumerate(asked):
        seed, first = seeds.take(key, num_samples, new_seed=number)
        draws = {(seed, index) for index in range(first, first + num_samples)}
        assert not draws & given_out
        given_out |= draws
        assert first + num_samples <= max(MOST_INDICES, num_samples)


def test_equal_requests_share_a_seed() -> None:
    seeds, key = SharedSeeds(), equality_key("ada", 3, PROMPT, WISH)
    assert [seeds.take(key, 4, new_seed=number) for number in (7, 8)] == [(7, 0), (7, 4)]
    assert seeds.take(equality_key("ada", 3, PROMPT.copy(), replace(WISH, num_samples=5)), 5, new_seed=9) == (7, 8)


def test_any_difference_gives_another_seed() -> None:
    keys = {
        equality_key("ada", 3, PROMPT, WISH),
        equality_key("eve", 3, PROMPT, WISH),
        equality_key("ada", 4, PROMPT, WISH),
        equality_key("ada", 3, PROMPT[:2], WISH),
        equality_key("ada", 3, PROMPT, replace(WISH, max_tokens=8)),
        equality_key("ada", 3, PROMPT, replace(WISH, temperature=0.5)),
        equality_key("ada", 3, PROMPT, replace(WISH, stop_ids=frozenset())),
        equality_key("ada", 3, PROMPT, replace(WISH, stop_strings=())),
        equality_key("ada", 3, PROMPT, replace(WISH, checked=True)),
    }
    assert len(keys) == 9
