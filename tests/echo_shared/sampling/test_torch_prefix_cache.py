from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from echo_shared.sampling.torch_prefix_cache import PrefixCache, States, as_past, length_of


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def states(length: int) -> States:
    """Return random keys and values of `length` tokens for two layers with 2 heads of size 3."""
    return [(torch.rand(2, length, 3), torch.rand(2, length, 3)) for _ in range(2)]


def test_the_longest_beginning_is_found_and_never_the_whole() -> None:
    cache = PrefixCache(100)
    short, long = states(2), states(4)
    cache.keep(ids(1, 2), short)
    cache.keep(ids(1, 2, 3, 4), long)
    assert cache.longest(ids(1, 2, 3, 4, 5)) is long
    assert cache.longest(ids(1, 2, 3, 4)) is short, "at least one token is computed"
    assert cache.longest(ids(1, 2, 9, 4, 5)) is short
    assert cache.longest(ids(2, 2, 3, 4, 5)) == ()
    assert [length_of(one) for one in (short, long, ())] == [2, 4, 0]


def test_the_oldest_entries_are_removed_to_make_space() -> None:
    cache = PrefixCache(6)
    first, second, third = states(2), states(3), states(2)
    for kept, length, own in ((first, 2, 1), (second, 3, 2), (third, 2, 3)):
        cache.keep(ids(*[own] * length), kept)
    assert cache.longest(ids(1, 1, 0)) == ()
    assert cache.longest(ids(2, 2, 2, 0)) is second and cache.longest(ids(3, 3, 0)) is third
    cache.keep(ids(*range(7)), states(7))
    assert cache.longest(ids(*range(8))) == (), "longer than the whole cache"
    assert cache.longest(ids(3, 3, 0)) is third, "nothing was removed for it"
    cache.keep(ids(3, 3), first)
    assert cache.longest(ids(3, 3, 0)) is first and cache.longest(ids(2, 2, 2, 0)) is second


def test_a_past_ends_at_the_first_computed_token() -> None:
    one, other = states(4), states(3)
    past = as_past([one, (), other], [4, 0, 1], 5)
    assert past.get_seq_length() == 5
    for number, layer in enumerate(past.layers):
        for held, kind in ((layer.keys, 0), (layer.values, 1)):
            assert held.shape == (3, 2, 5, 3)
            assert torch.equal(held[0, :, 1:], one[number][kind]) and not held[0, :, 0].any()
            assert not held[1].any()
            assert torch.equal(held[2, :, 4:], other[number][kind][:, :1]) and not held[2, :, :4].any()
