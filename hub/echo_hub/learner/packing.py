"""Attention over a packed sequence: linear layers see each token once, attention sees rows.

A micro-batch is one sequence without padding: each prompt once, followed by its completions. Everything that a
transformer computes token by token (projections, norms, feed-forward) runs on that sequence. Only attention mixes
tokens. For attention, each row (prompt plus one completion) is gathered from the sequence. Causal attention runs on
these rows without a mask, and its results are scattered back. So a prompt's tokens are computed once for all
completions. The attention kernels are the same as for separate rows.

On a GPU, the backward pass of PyTorch's own gathering sorts the indices, in about 14 kernels for every tensor of every
layer. The order in which gradients are added is known beforehand, so `Gather` stores it, and one kernel adds them.

Dimensions: T positions of the packed sequence, R rows of L positions, S places in all rows, F values of each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, embedding_bag
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from echo_hub.learner.device import moved

ATTENTION: Final = "echo_packed"
"""Value of `attn_implementation` for loading models. Without `rows`, this attention behaves like "sdpa"."""

_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest error, relative to the largest value, at which packed and separate rows count as equal. A model in which
packed rows influence each other has errors as large as the values themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Which rows of a table to take, and in which order to add the gradients of a row that is taken repeatedly."""

    index: Tensor
    """Numbers of the rows to take, int64."""
    sums: tuple[Tensor, ...]
    """Two tensors for each stage of the sum: which rows of the stage before to add, and where each result begins."""

    @classmethod
    def of(cls, index: NDArray[np.int64], size: int, parts: Sequence[int] = ()) -> Gather:
        """Take rows `index` of a table with `size` rows. `parts` are numbers of consecutive entries of `index`.
        Gradients are added within each part, then over the parts, the last part first. Autograd adds in this order if
        each part is taken by itself.
        """
        count = max(1, len(parts))
        keys = index * count + np.repeat(np.arange(count)[::-1], parts or [len(index)])
        order = np.argsort(keys, kind="stable")
        keys, begins = np.unique(keys[order], return_index=True)
        stages = [order, begins, np.arange(len(keys)), np.searchsorted(keys, np.arange(size) * count)]
        if count == 1:
            stages = [order, np.searchsorted(index[order], np.arange(size))]
        return cls(index=torch.from_numpy(index), sums=tuple(map(torch.from_numpy, stages)))

    def to(self, device: torch.device) -> Gather:
        return Gather(index=moved(self.index, device), sums=tuple(moved(values, device) for values in self.sums))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The mapping between rows and the packed sequence."""

    shapes: tuple[tuple[int, int], ...]
    """Number and length of the rows of similar length that are computed together."""
    laid_out: Gather
    """Takes the tokens of all rows from the packed sequence, row after row. Padding repeats a row's last token."""
    packed: Gather
    """Takes the results of the packed sequence's tokens from the results of all rows. A prompt's results come from its
    first row; those in its other rows are unused.
    """

    @classmethod
    def of(cls, positions_RL: Sequence[NDArray[np.int64]], places_T: NDArray[np.int64]) -> Rows:
        """Return the mapping. `positions_RL` holds each row's positions in the packed sequence, one array for rows of
        similar length. `places_T` holds, for each position, its place in all `positions_RL` concatenated.
        """
        sizes = [positions.size for positions in positions_RL]
        index = np.concatenate([positions.flatten() for positions in positions_RL])
        return cls(
            shapes=tuple((len(positions), positions.shape[1]) for positions in positions_RL),
            laid_out=Gather.of(index, len(places_T), sizes),
            packed=Gather.of(places_T, len(index)),
        )

    def to(self, device: torch.device) -> Rows:
        return Rows(shapes=self.shapes, laid_out=self.laid_out.to(device), packed=self.packed.to(device))

    @property
    def longest(self) -> int:
        return max(length for _, length in self.shapes)

    def split(self, values_S: Tensor) -> list[Tensor]:
        """Return the values [S, ...] of all rows as one tensor [R, L, ...] for rows of similar length."""
        parts = values_S.split([count * length for count, length in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]


def take(values_TF: Tensor, index: Tensor) -> Tensor:
    """Return `values_TF[index]`.

    Use the embedding function: its backward pass, which sums the gradients of repeated positions, is deterministic on
    every device and fastest on CPUs.
    """
    return embedding(index, values_TF)


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, values_TF: Tensor, index_S: Tensor, *sums: Tensor) -> Tensor:
        ctx.save_for_backward(*sums)
        return embedding(index_S, values_TF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        sums = ctx.saved_tensors
        for order, begins in zip(sums[::2], sums[1::2], strict=True):
            gradient = embedding_bag(order, gradient, begins, mode="sum")
        return gradient, *[None] * (1 + len(sums))


def gathered(values_TF: Tensor, gather: Gather) -> Tensor:
    """Return the rows of `values_TF` that `gather` takes."""
    if values_TF.device.type == "mps":  # Only newer versions of PyTorch have embedding_bag on it.
        return take(values_TF, gather.index)
    found: Tensor = _Gathered.apply(values_TF, gather.index, *gather.sums)  # type: ignore[no-untyped-call]
    return found


def register() -> None:
    """Register the attention function under the name ATTENTION in transformers."""
    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Rows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with transformers' interface: inputs [1, heads, T, size], output [1, T, heads, size]."""
    if rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    # Three lists: queries, keys, values. Each has a tensor [R, L, heads, size] for each set of R rows that are padded
    # to the same length L.
    laid_out = [
        [part.unflatten(2, (-1, states.shape[-1])) for part in rows.split(gathered(_of_tokens(states), rows.laid_out))]
        for states in (query, key, value)
    ]
    results = []
    for of_rows in zip(*laid_out, strict=True):
        query_RL, key_RL, value_RL = (states.transpose(1, 2) for states in of_rows)
        result, _ = sdpa_attention_forward(module, query_RL, key_RL, value_RL, None, **kwargs)
        results.append(result.flatten(0, 1))
    together = torch.cat(results)
    return gathered(together.flatten(1), rows.packed).unflatten(-1, together.shape[1:])[None], None


def _of_tokens(states: Tensor) -> Tensor:
    """Return states [1, heads, T, size] as [T, F]."""
    return states.squeeze(0).transpose(0, 1).flatten(1)


def packed_states(body: Any, input_ids_T: Tensor, position_ids_T: Tensor, rows: Rows) -> Tensor:
    """Return the last hidden states [T, H] of a transformers model without its head, computed packed."""
    output = body(
        input_ids=input_ids_T[None],
        position_ids=position_ids_T[None],
        # Given a four-dimensional mask, transformers makes none of its own. `packed_attention` does not use it.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids_T.device),
        use_cache=False,
        rows=rows,
    )
    return output.last_hidden_state[0]  # type: ignore[no-any-return]


def separate_states(body: Any, input_ids_T: Tensor, rows: Rows) -> Tensor:
    """Return the last hidden states [T, H], each row computed separately.

    Models that mix tokens by more than attention need this.
    """
    results = [
        body(input_ids=input_ids_RL, use_cache=False).last_hidden_state.flatten(0, 1)
        for input_ids_RL in rows.split(input_ids_T[rows.laid_out.index])
    ]
    return gathered(torch.cat(results), rows.packed)


@torch.no_grad()
def can_pack(body: Any, device: torch.device) -> bool:
    """Return True if the model computes the same for packed and separate rows, tested on two rows with a
    common prompt.
    """
    ids = torch.arange(7, device=device) % body.config.vocab_size
    position_ids = torch.tensor([0, 1, 2, 3, 4, 2, 3], device=device)
    rows = Rows.of([np.array([[0, 1, 2, 3, 4], [0, 1, 5, 6, 6]])], np.array([0, 1, 2, 3, 4, 7, 8])).to(device)
    expected = separate_states(body, ids, rows)
    try:
        found = packed_states(body, ids, position_ids, rows)
    except (TypeError, ValueError, RuntimeError):
        return False  # The model rejects `rows` or a four-dimensional mask.
    error = (found - expected).abs().max() / expected.abs().max()
    return bool(error < _TOLERANCE[expected.dtype])
