"""Caches of keys, values and states for a batch whose rows start, move and end independently. They have the interface
of mlx-lm's caches.

Rows of attention layers share one array of keys and have separate positions: a mask hides everything beyond a row's
position, and everything before its sliding window. Rows of recurrent layers have states of fixed size, which are
copied.

Dimensions: R rows in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from numpy.typing import NDArray

from echo_shared.delta.base_weights import unsupported_model

Arrays = tuple[mx.array, ...]
"""Arrays that one layer keeps of a prompt: keys and values [1, heads, tokens, head size], or states [1, ...]."""


class Step:
    """Positions and masks of the next step, shared by all layers."""

    count = 0
    """Number of rows in use, R."""

    def set(self, positions_R: NDArray[np.int32]) -> None:
        self.count = len(positions_R)
        self.rows = mx.arange(self.count)
        self.positions = mx.array(positions_R)
        self.length = int(positions_R.max()) + 1
        self._masks: dict[int | None, mx.array] = {}

    def mask(self, window: int | None) -> mx.array:
        """Return the mask [R, 1, 1, tokens] of a layer that attends to the last `window` tokens; None: to all."""
        if window not in self._masks:
            columns, last = mx.arange(self.length), self.positions[:, None]
            seen = columns <= last
            if window is not None:
                seen = seen & (columns > last - window)
            self._masks[window] = seen[:, None, None]
        return self._masks[window]


class PromptKeys(KVCache):  # type: ignore[misc]
    """Keys and values of whole prompts. Even a layer with a sliding window keeps all tokens."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self._own_window = window

    def make_mask(self, tokens: int, *, window_size: int | None = None, return_array: bool = False) -> Any:
        return super().make_mask(tokens, window_size=window_size or self._own_window, return_array=return_array)


class KeyRows:
    """One attention layer's keys and values of all rows, [rows, heads, tokens, head size]."""

    def __init__(self, probe: KVCache | RotatingKVCache, step: Step, *, window: int | None, grouped: bool) -> None:
        """`grouped`: masks have a dimension for groups of heads."""
        self.keys = probe.keys[:0]
        self.values = probe.values[:0]
        self.window = window
        self._step = step
        self._grouped = grouped

    @property
    def bytes_per_token(self) -> int:
        heads, size = self.keys.shape[1], self.keys.shape[3] + self.values.shape[3]
        return int(heads * size * self.keys.dtype.size)

    @property
    def bytes_per_row(self) -> int:
        return 0

    @property
    def stored(self) -> Arrays:
        return self.keys, self.values

    def reshape(self, rows: int, length: int, kept_rows: int) -> None:
        self.keys = _reshaped(self.keys, rows, length, kept_rows)
        self.values = _reshaped(self.values, rows, length, kept_rows)

    def put(self, prompt: Arrays, targets: mx.array) -> None:
        if prompt:  # A prompt of one token leaves no keys: its only token is fed later.
            keys, values = prompt
            self.keys[targets, :, : keys.shape[2]] = keys
            self.values[targets, :, : keys.shape[2]] = values

    def move(self, sources: mx.array, targets: mx.array) -> None:
        self.keys[targets] = self.keys[sources]
        self.values[targets] = self.values[sources]

    def of_tokens(self, row: int, length: int) -> Arrays:
        """Return the keys and values of the first `length` tokens of a row."""
        one = slice(row, row + 1)
        return mx.contiguous(self.keys[one, :, :length]), mx.contiguous(self.values[one, :, :length])

    def for_prompts(self, resumed: Arrays = ()) -> PromptKeys:
        """Return an empty cache for whole prompts, or one that continues a prompt."""
        cache = PromptKeys(self.window)
        if resumed:
            cache.keys, cache.values = resumed
            cache.offset = resumed[0].shape[2]
        return cache

    @property
    def offset(self) -> mx.array:
        return self._step.positions

    def make_mask(self, _tokens: int, *, window_size: int | None = None, **_options: Any) -> mx.array:
        mask = self._step.mask(window_size or self.window)
        return mask[:, None] if self._grouped else mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        step = self._step
        self.keys[step.rows, :, step.positions] = keys[:, :, 0]
        self.values[step.rows, :, step.positions] = values[:, :, 0]
        count = len(keys)
        return self.keys[:count, :, : step.length], self.values[:count, :, : step.length]


class StateRows:
    """One recurrent layer's states of all rows, each [rows, ...]. A row's first state is zero."""

    lengths = None
    left_padding = None

    def __init__(self, probe: ArraysCache, step: Step) -> None:
        self._held = [state[:0] for state in probe.cache]
        self._step = step

    @property
    def bytes_per_token(self) -> int:
        return 0

    @property
    def bytes_per_row(self) -> int:
        return int(sum(np.prod(state.shape[1:]) * state.dtype.size for state in self._held))

    @property
    def stored(self) -> Arrays:
        return tuple(self._held)

    def reshape(self, rows: int, _length: int, kept_rows: int) -> None:
        for number, old in enumerate(self._held):
            new = mx.zeros((rows, *old.shape[1:]), old.dtype)
            new[:kept_rows] = old[:kept_rows]
            self._held[number] = new

    def put(self, prompt: Arrays, targets: mx.array) -> None:
        for number, held in enumerate(self._held):
            held[targets] = prompt[number] if prompt else mx.zeros((1, *held.shape[1:]), held.dtype)

    def move(self, sources: mx.array, targets: mx.array) -> None:
        for held in self._held:
            held[targets] = held[sources]

    def for_prompts(self, resumed: Arrays = ()) -> ArraysCache:
        cache = ArraysCache(len(self._held))
        if resumed:
            cache.cache = list(resumed)
        return cache

    def make_mask(self, _tokens: int) -> None:
        return None

    def __getitem__(self, number: int) -> mx.array:
        return self._held[number][: self._step.count]

    def __setitem__(self, number: int, state: mx.array) -> None:
        if len(state) == len(self._held[number]):
            self._held[number] = state
        else:
            self._held[number][: len(state)] = state

    def advance(self, _tokens: int) -> None:
        pass


Rows = KeyRows | StateRows


class OwnMask(nn.Module):  # type: ignore[misc]
    """A layer that gets its mask from its own cache, for classes that ignore sliding windows."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.masked = layer

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return self.masked(x, cache.make_mask(x.shape[1], return_array=True), cache)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in self or "masked" not in self else getattr(self["masked"], name)


def rows_like(probes: Sequence[Any], step: Step, windows: Sequence[int | None], *, grouped: bool) -> list[Rows]:
    """Return empty rows for each of mlx-lm's caches, to which one token was fed.

    Raises BackendError for an unknown kind of cache.
    """
    rows: list[Rows] = []
    for probe, window in zip(probes, windows, strict=True):
        if type(probe) is ArraysCache and all(state is not None for state in probe.cache):
            rows.append(StateRows(probe, step))
        elif type(probe) in (KVCache, RotatingKVCache):
            rows.append(KeyRows(probe, step, window=window, grouped=grouped))
        else:
            raise unsupported_model(f"layers whose memory is a {type(probe).__name__} of mlx-lm")
    return rows


def kept(cache: PromptKeys | ArraysCache) -> Arrays:
    """Return the arrays of a cache for whole prompts, so that the caller can make MLX compute them."""
    if isinstance(cache, ArraysCache):
        return tuple(cache.cache)
    return cache.keys, cache.values


def of_row(cache: PromptKeys | ArraysCache, row: int, length: int) -> Arrays:
    """Return what `cache` keeps of the prompt in `row`, which has `length` tokens."""
    one = slice(row, row + 1)
    if isinstance(cache, ArraysCache):
        return tuple(mx.contiguous(state[one]) for state in cache.cache)
    return mx.contiguous(cache.keys[one, :, :length]), mx.contiguous(cache.values[one, :, :length])


def _reshaped(old: mx.array, rows: int, length: int, kept_rows: int) -> mx.array:
    new = mx.zeros((rows, old.shape[1], length, old.shape[3]), old.dtype)
    if kept_rows:
        most = min(length, old.shape[2])
        new[:kept_rows, :, :most] = old[:kept_rows, :, :most]
    return new
