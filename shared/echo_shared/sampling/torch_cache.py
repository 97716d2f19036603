"""Keys and values of a continuous batch, behind transformers' cache interface. Rows join and leave; memory is reused.

All rows end at the same column: one step writes one column of every row, and a joining prompt is copied up to that
column. Attention reads from the first token of the longest row; columns before a shorter row's first token are masked.
When the last column is reached, all rows move to the left. Keys arrive with rotary positions applied, so a token's
column need not equal its position; columns must only be consecutive.

Rows are 0..n-1 without gaps. Layers with a recurrent state have no columns: the row's state is copied instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from echo_shared.errors import BackendError

_COLUMN_STEP: Final = 32
_CACHE: Final = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
"""Name of a model's cache argument. transformers 5.24 renamed it and accepts the old name until 5.40."""


def cache_argument(cache: Any) -> Mapping[str, Any]:
    """Return the keyword argument that passes `cache` to a model. None lets the model create a cache."""
    return {_CACHE: cache}


def cache_of(output: Any) -> Any:
    return output[_CACHE]


def columns_for(length: int) -> int:
    """Return the number of columns to reserve for rows of `length` tokens. It includes spare columns, so that rows
    seldom have to move left.
    """
    return -(-(length + length // 8 + 16) // _COLUMN_STEP) * _COLUMN_STEP


@dataclass(frozen=True, slots=True)
class RowBytes:
    """The memory that one row takes in the cache of a model, in bytes."""

    per_token: int
    """Keys and values of one token in all attention layers."""
    states: int
    """Recurrent and convolution states, whatever the row's length."""

    @property
    def state_tokens(self) -> int:
        """Number of tokens whose keys and values take as much memory as the row's `states`."""
        return -(-self.states // self.per_token)


@torch.inference_mode()
def row_bytes(model: Any) -> RowBytes:
    """Return the memory that a row takes in the cache of a transformers causal LM, measured with one token.

    Raises BackendError for a model whose cache `SlotCache` cannot hold.
    """
    ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    layers = getattr(model(input_ids=ids, use_cache=True, logits_to_keep=1).get(_CACHE), "layers", ())
    held = [tensor for layer in layers for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    for layer in layers:
        _layer_like(layer, _Window())
    if not _bytes(held):
        raise _unsupported("no attention layer")
    states = [
        state
        for layer in layers
        if isinstance(layer, LinearAttentionLayer)
        for kind in (layer.conv_states, layer.recurrent_states)
        for state in kind.values()
    ]
    return RowBytes(_bytes(held), _bytes(states))


def _bytes(tensors: Sequence[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def pads_exactly(model: Any) -> bool:
    """Return False if padding changes a prompt's results. This happens if a biased projection comes before a
    convolution: it turns masked tokens into the bias, which transformers convolves with the prompt's first tokens.
    """
    config = model.config.get_text_config(decoder=True)
    return not any(getattr(config, name, False) for name in ("conv_bias", "mamba_proj_bias"))


def spare_bytes(device: torch.device) -> int:
    """Return the bytes to use for keys and values: half of a GPU's free memory, or a quarter of the host's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    return int(psutil.virtual_memory().total) // 4


class SlotCache:
    """Keys and values of all rows. For each step call `before_step`, run the model with `cache`, call `after_step`."""

    def __init__(self, device: torch.device) -> None:
        self.cache: Any = None
        self.rows, self.columns = 0, 0
        self.device = device
        self._window = _Window()
        self._starts = np.zeros(0, dtype=np.int64)
        self._mask = torch.zeros((0, 0), dtype=torch.bool)

    @property
    def count(self) -> int:
        """Number of rows that hold a rollout now."""
        return self._window.count

    @property
    def high(self) -> int:
        """Column that the next step writes."""
        return self._window.high

    @property
    def starts(self) -> NDArray[np.int64]:
        """First column of each row in use."""
        return self._starts[: self._window.count]

    @property
    def memory(self) -> Any:
        """Object that is replaced by another one whenever the keys and values move to other addresses."""
        return self._mask

    @property
    def holds_every_token(self) -> bool:
        """True if all layers hold every token's keys and values. Call this after the first `join`."""
        layers = self._slot_layers()
        return len(layers) == len(self.cache.layers) and not any(layer.is_sliding for layer in layers)

    def reserve(self, rows: int, columns: int) -> None:
        """Resize the memory to `rows` rows of `columns` tokens. The rows in use must fit."""
        window = self._window
        # Drop the columns before the longest remaining row: longer rows may have left since the last step.
        window.low = int(self._starts[: window.count].min()) if window.count else window.high
        length = window.high - window.low
        for layer in self._slot_layers():
            layer.resize(rows, columns)
        starts, mask = self._starts, self._mask
        self._starts = np.zeros(rows, dtype=np.int64)
        self._mask = torch.ones((rows, columns), dtype=torch.bool, device=self.device)
        self._starts[: window.count] = starts[: window.count] - window.low
        self._mask[: window.count, :length] = mask[: window.count, window.low : window.high]
        self.rows, self.columns = rows, columns
        window.low, window.high = 0, length

    def join(self, prompts: Any, sources: Sequence[int], rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Copy the keys and values of prompts with these lengths into `rows`. New rows must directly follow the last
        row.

        `prompts` is the cache that the model returned for the prompts, padded on the left. `sources` are the prompts'
        rows in this cache.
        """
        window = self._window
        if self.cache is None:
            self.cache = Cache(layers=[_layer_like(layer, window) for layer in prompts.layers])
            for layer in self._slot_layers():
                layer.resize(self.rows, self.columns)
        if window.count == 0:
            window.low = window.high = max(lengths)
        elif window.high < max(lengths):
            self._move_columns(max(lengths))
        count = max(window.count, max(rows) + 1)
        sources_J, rows_J = self._index(sources), self._index(rows)
        for mine, theirs in zip(self.cache.layers, prompts.layers, strict=True):
            if isinstance(mine, _SlotLayer):
                mine.take_prompts(theirs, sources_J, rows_J, max(lengths))
            elif isinstance(mine, LinearAttentionLayer):
                _join_states(mine, theirs, sources_J, rows_J, count)
        window.count = count
        self._starts[rows] = window.high - np.asarray(lengths)
        # Update now: `reserve` uses this window if more rows join before the next step.
        window.low = int(self._starts[:count].min())
        columns = torch.arange(self.columns, device=self.device)
        self._mask[rows_J] = columns >= self._index(self._starts[rows])[:, None]

    def move(self, sources: Sequence[int], rows: Sequence[int], count: int) -> None:
        """Copy rows `sources` over `rows`, then keep only the first `count` rows."""
        sources_J, rows_J = self._index(sources), self._index(rows)
        window = self._window
        for layer in self.cache.layers if self.cache is not None else ():
            if isinstance(layer, _SlotLayer):
                layer.move_rows(sources_J, rows_J)
            elif isinstance(layer, LinearAttentionLayer):
                _keep_states(layer, sources_J, rows_J, count)
        if len(rows):
            self._starts[rows] = self._starts[sources]
            self._mask[rows_J] = self._mask[sources_J]
        window.count = count

    def states(self, row: int) -> list[tuple[Tensor, Tensor]] | None:
        """Return copies of a row's keys and values by layer, both [heads, tokens, head size].

        Return None if some layers do not hold every token's keys and values.
        """
        if not self.holds_every_token:
            return None
        layers = self._slot_layers()
        used = slice(int(self._starts[row]), self._window.high)
        return [(layer.held[0][row, :, used].clone(), layer.held[1][row, :, used].clone()) for layer in layers]

    def make_space(self) -> None:
        """Make space for one token per row."""
        window = self._window
        window.low = int(self.starts.min())
        if window.high == self.columns:
            self._move_columns(window.high - window.low)

    @contextmanager
    def fixed(self, rows: int, columns: int, at: Tensor) -> Iterator[None]:
        """Within the block, the model reads the first `rows` rows and the first `columns` columns, and writes column
        `at` [1]. Shapes and addresses do not depend on the number of rows and columns in use.
        """
        self._window.fixed = _Fixed(rows, columns, at)
        try:
            yield
        finally:
            self._window.fixed = None

    def before_step(self) -> Tensor | None:
        """Make space for one token per row. Return the attention mask [rows, tokens], or None if no token is masked."""
        window = self._window
        self.make_space()
        if int(self._starts[: window.count].max()) == window.low:
            return None
        return self._mask[: window.count, window.low : window.high + 1]

    def after_step(self) -> None:
        self._window.high += 1

    def _move_columns(self, high: int) -> None:
        window = self._window
        shift = high - window.high
        for layer in self._slot_layers():
            layer.move_columns(shift)
        count, used = window.count, slice(window.low, window.high)
        moved = self._mask[:count, used].clone()
        self._mask[:count] = True
        self._mask[:count, : window.low + shift] = False
        self._mask[:count, window.low + shift : high] = moved
        self._starts += shift
        window.low, window.high = window.low + shift, high

    def _slot_layers(self) -> list[_SlotLayer]:
        layers = self.cache.layers if self.cache is not None else ()
        return [layer for layer in layers if isinstance(layer, _SlotLayer)]

    def _index(self, values: Sequence[int] | NDArray[np.int64]) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(self.device)


class _Window:
    """Rows [:count] and columns [low:high] that are in use. All layers share this object."""

    def __init__(self) -> None:
        self.count = self.low = self.high = 0
        self.fixed: _Fixed | None = None


@dataclass(frozen=True, slots=True)
class _Fixed:
    """The arguments of `SlotCache.fixed` while its block runs."""

    rows: int
    columns: int
    at: Tensor


class _SlotLayer(DynamicLayer):
    """Keys and values of one layer, each [rows, heads, columns, head size]."""

    def __init__(self, window: _Window, like: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = like.is_sliding  # Set per instance: transformers asks each layer for its kind of mask.
        self.is_initialized = True
        self._window = window
        self.held: list[Tensor] = [like.keys[:0, :, :0], like.values[:0, :, :0]]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append one token's keys and values per row, both [rows, heads, 1, head size]. Return the keys and values of
        all tokens.
        """
        count, low, high = self._window.count, self._window.low, self._window.high
        fixed = self._window.fixed
        if fixed is not None:
            keys, values = (held[: fixed.rows, :, : fixed.columns] for held in self.held)
            keys.index_copy_(2, fixed.at, key_states)
            values.index_copy_(2, fixed.at, value_states)
            return keys, values
        for held, new in zip(self.held, (key_states, value_states), strict=True):
            held[:count, :, high] = new[:, :, 0]
        keys, values = (held[:count, :, low : high + 1] for held in self.held)
        return keys, values

    def get_seq_length(self) -> int:
        return self._window.high - self._window.low

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def resize(self, rows: int, columns: int) -> None:
        count, low, high = self._window.count, self._window.low, self._window.high
        for number, old in enumerate(self.held):
            # Use zeros: uninitialized memory may hold NaN, which masking does not remove.
            new = old.new_zeros((rows, old.shape[1], columns, old.shape[3]))
            new[:count, :, : high - low] = old[:count, :, low:high]
            self.held[number] = new

    def take_prompts(self, prompts: Any, sources: Tensor, rows: Tensor, length: int) -> None:
        """Copy the last `length` tokens of rows `sources` [R] of `prompts` into `rows` [R]."""
        high = self._window.high
        for held, new in zip(self.held, (prompts.keys, prompts.values), strict=True):
            last = new[:, :, -length:]  # A sliding-window layer may hold fewer tokens than the prompt has.
            held[rows, :, high - last.shape[2] : high] = last[sources]

    def move_rows(self, sources: Tensor, rows: Tensor) -> None:
        low, high = self._window.low, self._window.high
        for held in self.held:
            held[rows, :, low:high] = held[sources, :, low:high]

    def move_columns(self, shift: int) -> None:
        count, low, high = self._window.count, self._window.low, self._window.high
        for held in self.held:
            held[:count, :, low + shift : high + shift] = held[:count, :, low:high].clone()


def _layer_like(layer: Any, window: _Window) -> Any:
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return _SlotLayer(window, layer)
    if type(layer) is LinearAttentionLayer:
        return LinearAttentionLayer(number_of_states=layer.number_of_states)
    if type(layer) is DummyLayer:
        return layer
    raise _unsupported(f"a layer whose state is a {type(layer).__name__}")


def _unsupported(got: str) -> BackendError:
    return BackendError(
        "The sampler cannot batch this kind of model.",
        got=got,
        do="Use a base model of docs/models.md.",
        code="unsupported_model",
    )


def _join_states(mine: Any, theirs: Any, sources: Tensor, rows: Tensor, count: int) -> None:
    for name in ("conv_states", "recurrent_states"):
        for number, state in getattr(theirs, name).items():
            if state is not None:
                old = getattr(mine, name)[number]
                new = state.new_zeros((count, *state.shape[1:]))
                if old is not None:
                    new[: len(old)] = old
                new[rows] = state[sources]
                getattr(mine, name)[number] = new
                getattr(mine, f"is_{name}_initialized")[number] = True
    mine.has_previous_state.update(theirs.has_previous_state)
    mine.conv_kernel_size.update(theirs.conv_kernel_size)
    mine.device, mine.dtype = theirs.device, theirs.dtype


def _keep_states(layer: Any, sources: Tensor, rows: Tensor, count: int) -> None:
    for states in (layer.conv_states, layer.recurrent_states):
        for number, state in states.items():
            if state is not None:
                state[rows] = state[sources]
                states[number] = state[:count].clone()
