from __future__ import annotations

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from echo_shared.sampling.torch_prefix_cache import States, as_past, states_of


def states(length: int) -> States:
    """Return random keys of size 3 and values of size 4, of `length` tokens, for two layers with 2 heads."""
    return [(torch.rand(2, length, 3), torch.rand(2, length, 4)) for _ in range(2)]


def test_a_past_ends_at_the_first_computed_token() -> None:
    one, other = states(4), states(3)
    past = as_past([one, (), other], [4, 0, 1], 5)
    assert past.get_seq_length() == 5
    for number, layer in enumerate(past.layers):
        for held, kind in ((layer.keys, 0), (layer.values, 1)):
            assert held.shape == (3, 2, 5, 3 + kind)
            assert torch.equal(held[0, :, 1:], one[number][kind]) and not held[0, :, 0].any()
            assert not held[1].any()
            assert torch.equal(held[2, :, 4:], other[number][kind][:, :1]) and not held[2, :, :4].any()


def test_the_states_of_a_prompt_are_cut_out_of_several() -> None:
    one, other = states(4), states(3)
    past = as_past([one, other], [4, 3], 4)
    for place, length, kept in ((0, 4, one), (1, 3, other)):
        found = states_of(past, place, length)
        assert found is not None
        for pair, expected in zip(found, kept, strict=True):
            assert all(torch.equal(*both) for both in zip(pair, expected, strict=True))
    past.layers[1] = DynamicSlidingWindowLayer(2)
    assert states_of(past, 0, 4) is None
