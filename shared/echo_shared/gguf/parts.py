"""Tensors of transformers as llama.cpp stores them.

Most differences are an order of rows or columns, which applies to a weight matrix, its bias and an adapter alike: if a
layer computes W·x, and llama.cpp wants the rows `r` of the result, then an adapter B·A becomes B[r]·A. If llama.cpp
gives the layer's input in the order `c`, the weight becomes W[:, c] and the adapter B·A[:, c].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Order = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A tensor of llama.cpp, made of one tensor of transformers."""

    name: str
    """Name in the style of transformers, which `gguf.get_tensor_name_map` knows."""
    rows: Order | None = None
    """Indices of the transformers tensor's rows that form this part, in order; None: all rows, in their order."""
    columns: Order | None = None
    value: Callable[[Array], Array] | None = None
    """Function that changes the tensor's values; None: the values stay. A tensor with such a change has no adapter."""

    def of(self, array: Array) -> Array:
        """Return the values of this part, taken from `array`, the tensor of transformers."""
        if self.rows is not None:
            array = array[self.rows]
        if self.columns is not None:
            array = array[..., self.columns]
        return array if self.value is None else self.value(array)


def layer_of(name: str) -> str:
    """Return the last part of the layer's name: q_proj of model.layers.0.self_attn.q_proj.weight."""
    return name.split(".")[-2] if "." in name else ""


def adjacent_pairs(num_heads: int, head_dim: int) -> Order:
    """Return the order of rows in which adjacent rows are rotated together. transformers rotates row i of a head
    together with row i + head_dim / 2.
    """
    return np.arange(num_heads * head_dim).reshape(num_heads, 2, -1).swapaxes(1, 2).reshape(-1)


def tiled(num_groups: int, group_size: int, width: int) -> Order:
    """Return an order of rows: heads are sorted by their number within a group, then by group. A head has `width`
    rows.
    """
    return np.arange(num_groups * group_size * width).reshape(num_groups, group_size, width).swapaxes(0, 1).reshape(-1)


def plus_one(array: Array) -> Array:
    """Return the factors of a norm layer from the stored ones: transformers stores the factors of some families minus
    1.
    """
    return array + np.float32(1)


def negative_exponential(array: Array) -> Array:
    """Return decay rates, -exp(array). transformers stores the logarithm of their absolute value."""
    rate: Array = -np.exp(array)
    return rate


def without_channels(array: Array) -> Array:
    """Return a depthwise convolution's kernels as [channels, width]. transformers stores them as [channels, 1,
    width].
    """
    return array[:, 0]
