"""Prefix caching, as in vLLM and SGLang: keeps keys and values of sampled sequences for prompts that extend them.

In an episode of several turns, each prompt is the previous one, its completion, and the environment's answer:

    turn 0   prompt            -> completion                    keys and values of all but the last token are kept
    turn 1   prompt completion observation -> completion        only the last token and the observation are computed

Kept states equal recomputed ones, up to rounding, only under the same policy version, so each version needs its own
cache.

Dimensions: H heads, T tokens, D head size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

States = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of one sequence, a pair for each layer, both [H, T, D]."""


class PrefixCache:
    """Keys and values of the newest sequences of one policy version, of up to `max_tokens` tokens in total."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._kept: dict[bytes, States] = {}
        """States by token ids, oldest first."""
        self._lengths: Counter[int] = Counter()

    def keep(self, ids_T: NDArray[np.int32], states: States) -> None:
        """Store `states`; drop the oldest sequences to make space. The caller must not modify `states` afterwards."""
        if len(ids_T) > self._max_tokens:
            return
        key = _key(ids_T)
        if key in self._kept:
            self._drop(key)
        while self._tokens + len(ids_T) > self._max_tokens:
            self._drop(next(iter(self._kept)))
        self._kept[key] = states
        self._tokens += len(ids_T)
        self._lengths[len(ids_T)] += 1

    def _drop(self, key: bytes) -> None:
        length = self._kept.pop(key)[0][0].shape[1]
        self._tokens -= length
        self._lengths[length] -= 1

    def longest(self, ids_T: NDArray[np.int32]) -> States:
        """Return the states of the longest kept sequence that is a proper prefix of `ids_T`; () if there is none."""
        for length in sorted(+self._lengths, reverse=True):
            if length < len(ids_T) and (found := self._kept.get(_key(ids_T[:length]))) is not None:
                return found
        return ()


def length_of(states: States) -> int:
    return int(states[0][0].shape[1]) if states else 0


def as_past(states_P: Sequence[States], lengths_P: Sequence[int], columns: int) -> Any:
    """Build a transformers cache of `columns` columns from each prompt's first `lengths_P` states, aligned to the
    right.

    Columns before a prompt's states are zero. At least one prompt must have states.
    """
    layers: list[Any] = []
    for number, (like, _) in enumerate(next(states for states in states_P if states)):
        keys, values = (like.new_zeros((len(states_P), like.shape[0], columns, like.shape[2])) for _ in range(2))
        for place, (states, length) in enumerate(zip(states_P, lengths_P, strict=True)):
            if length:
                for past, own in zip((keys, values), states[number], strict=True):
                    past[place, :, columns - length :] = own[:, :length]
        layer = DynamicLayer()
        layer.update(keys, values)
        layers.append(layer)
    return Cache(layers=layers)


def _key(ids_T: NDArray[np.int32]) -> bytes:
    return ids_T.astype("<i4").tobytes()
