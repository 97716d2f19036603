from __future__ import annotations

import random
from itertools import takewhile

import numpy as np
import pytest
from numpy.typing import NDArray

from echo_shared.sampling import prefix_cache
from echo_shared.sampling.prefix_cache import KeptKeys, PrefixCache


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def test_the_longest_beginning_is_found_and_never_the_whole() -> None:
    cache = PrefixCache[str](100)
    cache.keep(ids(1, 2), "short")
    cache.keep(ids(1, 2, 3, 4), "long")
    assert cache.take(ids(1, 2, 3, 4, 5)) == (4, "long")
    assert cache.take(ids(1, 2, 3, 4)) == (2, "short"), "at least one token is computed"
    assert cache.take(ids(1, 2, 9, 4, 5)) == (2, "short")
    assert cache.take(ids(2, 2, 3, 4, 5)) == cache.take(ids(1)) == (0, None)


def test_the_least_recently_used_sequences_make_space() -> None:
    cache = PrefixCache[int](7)
    for own in (1, 2, 3):
        cache.keep(ids(own, own), own)
    assert cache.take(ids(1, 1, 0)) == (2, 1)
    cache.keep(ids(4, 4), 4)
    assert cache.take(ids(2, 2, 0)) == (0, None), "the one that was not used for the longest time"
    assert [cache.take(ids(own, own, 0))[1] for own in (1, 3, 4)] == [1, 3, 4]
    cache.keep(ids(*range(8)), 8)
    assert cache.take(ids(*range(9))) == (0, None), "longer than the whole cache"
    assert cache.num_tokens == 6, "nothing was dropped for it"
    cache.keep(ids(3, 3), 33)
    assert cache.take(ids(3, 3, 0)) == (2, 33) and cache.num_tokens == 6


def test_sequences_of_a_version_serve_this_version_alone() -> None:
    cache = PrefixCache[str](100)
    for version in (1, 2, 255, 256):
        cache.keep(ids(5, 6), f"of {version}", version=version)
    assert cache.take(ids(5, 6, 7), version=3) == (0, None)
    cache.forget(255)
    assert cache.take(ids(5, 6, 7), version=255) == (0, None)
    assert cache.take(ids(5, 6, 7), version=256) == (2, "of 256")
    cache.forget()
    assert cache.num_tokens == 0 and cache.take(ids(5, 6, 7), version=1) == (0, None)


def test_a_cache_that_cuts_uses_the_common_part() -> None:
    cache = PrefixCache[str](1_000, cuts=True)
    first = np.arange(100, dtype=np.int32)
    cache.keep(first[:40], "turn 0")
    cache.keep(first, "turn 1")
    assert cache.num_tokens == 100, "turn 1 contains turn 0"
    cache.keep(first[:60], "turn 0 again")
    assert cache.num_tokens == 100
    other = np.concatenate([first[:30], first[:20]])
    assert cache.take(other) == (30, "turn 1") and cache.shared(other) == 30
    assert cache.take(first) == (99, "turn 1")
    few = np.concatenate([first[: prefix_cache.LEAST_SHARED - 1], first[:50]])
    assert cache.take(few) == (0, None), "too few tokens to be worth it"
    long = np.arange(200, 900, dtype=np.int32)
    cache.keep(long, "long")
    assert cache.take(np.concatenate([long[:80], first])) == (0, None), "too small a part of it"
    assert cache.take(np.concatenate([long[:90], first])) == (90, "long")


def test_reuse_is_counted() -> None:
    cache = PrefixCache[str](100)
    cache.keep(ids(1, 2, 3), "kept")
    cache.reused(cache.take(ids(1, 2, 3, 4))[0])
    cache.reused(0)
    assert cache.kept(10) + KeptKeys(hits=1) == KeptKeys(kept_bytes=30, hits=2, tokens=3)


@pytest.mark.parametrize("cuts", [False, True])
def test_every_prompt_finds_the_best_sequence(cuts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "LEAST_SHARED", 1)
    monkeypatch.setattr(prefix_cache, "LEAST_SHARE", 1_000)
    rng = random.Random(5)

    def some() -> tuple[int, tuple[int, ...]]:
        return rng.randrange(2), tuple(300 * rng.randrange(3) for _ in range(rng.randrange(1, 12)))

    for _ in range(20):
        cache = PrefixCache[int](10_000, cuts=cuts)
        kept = [some() for _ in range(60)]
        for number, (version, tokens) in enumerate(kept):
            cache.keep(ids(*tokens), number, version=version)
        for version, prompt in (some() for _ in range(60)):
            left = prompt[:-1]
            shared = [
                len(list(takewhile(lambda pair: pair[0] == pair[1], zip(own, left, strict=False))))
                for of, own in kept
                if of == version and (cuts or own == left[: len(own)])
            ]
            most = max(shared, default=0)
            count, number = cache.take(ids(*prompt), version=version)
            assert count == most
            assert number is None or kept[number][1][:count] == prompt[:count]
