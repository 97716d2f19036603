"""States of a prefix cache as PyTorch tensors, and the transformers cache that continues them.

Dimensions: H heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from echo_shared.sampling.prefix_cache import PrefixCache

States = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of one sequence, a pair for each layer, both [H, T, D]."""
TorchPrefixCache = PrefixCache[States]


def as_past(states_P: Sequence[States], lengths_P: Sequence[int], columns: int) -> Any:
    """Build a transformers cache of `columns` columns from each prompt's first `lengths_P` states, aligned to the
    right.

    Columns before a prompt's states are zero. At least one prompt must have states.
    """
    layers: list[Any] = []
    for number, likes in enumerate(next(states for states in states_P if states)):
        keys, values = (like.new_zeros((len(states_P), like.shape[0], columns, like.shape[2])) for like in likes)
        for place, (states, length) in enumerate(zip(states_P, lengths_P, strict=True)):
            if length:
                for past, own in zip((keys, values), states[number], strict=True):
                    past[place, :, columns - length :] = own[:, :length]
        layer = DynamicLayer()
        layer.update(keys, values)
        layers.append(layer)
    return Cache(layers=layers)


def states_of(prompts: Any, place: int, length: int) -> States | None:
    """Return copies of the keys and values of one prompt of `length` tokens.

    `prompts` is the cache that the model returned for several prompts, padded on the left; `place` is the prompt's row.
    Return None if some layers do not hold every token's keys and values.
    """
    if any(type(layer) is not DynamicLayer for layer in prompts.layers):
        return None
    held = [(layer.keys[place], layer.values[place]) for layer in prompts.layers]
    return [(keys[:, -length:].clone(), values[:, -length:].clone()) for keys, values in held]
