"""Keys and values of what was sampled, for prompts that begin with it: automatic prefix caching, as vLLM and SGLang do.

In an episode of several turns each prompt is the one before, the completion, and what was said to it:

    turn 0   prompt            -> completion                    all but the last token's keys and values are kept
    turn 1   prompt completion observation -> completion        the observation's, and that token's, are computed

What was kept is as good as computed anew, but for rounding, as long as the same policy computes: one cache a policy.

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
"""Keys and values of one sequence, a layer each, both [H, T, D]."""


class PrefixCache:
    """Of sequences by one policy, those that came last, up to `max_tokens` of them all."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._kept: dict[bytes, States] = {}
        """By their ids; the oldest first."""
        self._lengths: Counter[int] = Counter()

    def keep(self, ids_T: NDArray[np.int32], states: States) -> None:
        """Takes over `states`; the oldest sequences go where there is too little room."""
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
        """Of the longest sequence that is kept and that `ids_T` begins with and goes on from; none is empty."""
        for length in sorted(+self._lengths, reverse=True):
            if length < len(ids_T) and (found := self._kept.get(_key(ids_T[:length]))) is not None:
                return found
        return ()


def length_of(states: States) -> int:
    """Tokens."""
    return int(states[0][0].shape[1]) if states else 0


def as_past(states_P: Sequence[States], lengths_P: Sequence[int], columns: int) -> Any:
    """The cache in which transformers finds, at the end of `columns`, the first `lengths_P` tokens of each prompt's
    states; zeros before them. One prompt has states at least."""
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
