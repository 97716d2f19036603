"""Attention over a packed sequence: linear layers see each token once, attention sees rows.

A micro-batch is one sequence without padding: each prompt once, followed by its completions. Everything that a
transformer computes token by token (projections, norms, feed-forward) runs on that sequence. Only attention mixes
tokens. For attention, each row (prompt plus one completion) is gathered from the sequence. Causal attention runs on
these rows without a mask, and its results are scattered back. So a prompt's tokens are computed once for all
completions. The attention kernels are the same as for separate rows. Layers with a sliding window get a mask as soon as
a row is longer than the window.

Some models need more than PyTorch's attention function: Gemma 2 caps attention scores, gpt-oss adds a sink to each
softmax. Such models compute rows with their own function (`ATTENTION_OF_MODEL`).

On a GPU, the backward pass of PyTorch's own gathering sorts the indices, in about 14 kernels for every tensor of every
layer. The order in which gradients are added is known beforehand, so `Gather` stores it, and one kernel adds them.

Dimensions: T positions of the packed sequence, R rows of L positions, S places in all rows, F values of each token.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from transformers.masking_utils import eager_mask, sdpa_mask

from echo_hub.learner.device import moved
from echo_shared.errors import LearnerError

ATTENTION: Final = "echo_packed"
"""Value of `attn_implementation` for loading models. Without `rows`, this attention behaves like "sdpa"."""
ATTENTION_OF_MODEL: Final = "echo_packed_eager"
"""Value of `attn_implementation` for models that need their own attention function. Without `rows`, this attention
behaves like "eager".
"""

_ATTENTION_LAYERS: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Types of layers, as in transformers' configurations, that mix tokens by attention alone."""
_PROBED_WINDOW: Final = 3
"""Length in tokens of the sliding window with which `longest_packed` tests if rows can be packed."""

_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest error, relative to the largest value, at which packed and separate rows count as equal. A model in which
packed rows influence each other has errors as large as the values themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """The rows to take from a table, and the order in which gradients are added if a row is taken several times."""

    index: Tensor
    """Numbers of the rows to take, int64."""
    sums: tuple[Tensor, ...]
    """Two tensors for each stage of adding: which rows of the previous stage to add, in order, and the position in that
    list at which each sum begins.
    """

    @classmethod
    def of(cls, index: NDArray[np.int64], size: int, parts: Sequence[int] = ()) -> Gather:
        """Return the Gather that takes the rows `index` of a table with `size` rows. `parts` splits `index` into
        consecutive parts, by the number of entries of each. Gradients are added within each part, then over the parts,
        the last part first. Autograd adds in this order if the caller takes each part separately.
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
    """Takes the tokens from the packed sequence into rows, row after row. Padding repeats a row's last token."""
    packed: Gather
    """Takes the computed results from the rows back into the packed sequence. The results of a prompt that begins
    several rows come from its first row.
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
    """Register the attention functions under their names in transformers."""
    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    AttentionInterface.register(ATTENTION_OF_MODEL, packed_attention_of_model)
    AttentionMaskInterface.register(ATTENTION_OF_MODEL, eager_mask)


def attention_of(model: Any) -> str:
    """Return the name of the attention function that computes what this transformers model computes."""
    return ATTENTION if model._supports_sdpa else ATTENTION_OF_MODEL


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
    window = kwargs.get("sliding_window")
    results = []
    for query_RL, key_RL, value_RL in _laid_out(rows, query, key, value):
        length = query_RL.shape[2]
        # Without a mask, attention is causal and uses its fastest kernels.
        mask = None if window is None or length <= window else _causal_mask(length, window, query.device)
        results.append(sdpa_attention_forward(module, query_RL, key_RL, value_RL, mask, **kwargs)[0])
    return _packed(rows, results), None


def packed_attention_of_model(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Rows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the same as `packed_attention`, with the function `eager_attention_forward` of the Python file that
    defines the class of `module`."""
    eager: Any = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
    if eager is None:
        raise LearnerError(
            "The base model has no attention function that the learner can use.",
            got=type(module).__name__,
            do="Choose a base model of docs/models.md.",
        )
    if rows is None:
        computed: tuple[Tensor, Tensor | None] = eager(module, query, key, value, attention_mask, **kwargs)
        return computed
    results = []
    for query_RL, key_RL, value_RL in _laid_out(rows, query, key, value):
        mask = _causal_mask(query_RL.shape[2], kwargs.get("sliding_window"), query.device)
        added = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
        results.append(eager(module, query_RL, key_RL, value_RL, added, **kwargs)[0])
    return _packed(rows, results), None


def _causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask [1, 1, L, L] of tokens that each token attends to: itself and tokens before it, `window` tokens
    in all."""
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril_()
    return mask if window is None else mask.triu_(1 - window)


def _laid_out(rows: Rows, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield queries, keys and values [R, heads, L, size] of each set of rows, from those of all tokens [1, heads, T,
    size]."""
    # Three lists: queries, keys, values. Each has a tensor [R, L, heads, size] for each set of R rows that are padded
    # to the same length L.
    laid_out = [
        [part.unflatten(2, (-1, states.shape[-1])) for part in rows.split(gathered(_of_tokens(states), rows.laid_out))]
        for states in (query, key, value)
    ]
    for query_RL, key_RL, value_RL in zip(*laid_out, strict=True):
        yield query_RL.transpose(1, 2), key_RL.transpose(1, 2), value_RL.transpose(1, 2)


def _packed(rows: Rows, results: Sequence[Tensor]) -> Tensor:
    """Return the results of all tokens [1, T, heads, size], from those of each set of rows [R, L, heads, size]."""
    together = torch.cat([result.flatten(0, 1) for result in results])
    of_tokens = gathered(together.flatten(1), rows.packed)
    packed: Tensor = of_tokens.unflatten(-1, together.shape[1:])[None]
    return packed


def _of_tokens(states: Tensor) -> Tensor:
    """Flatten the heads: return states [1, heads, T, size] as [T, F], with one row of F = heads · size values for each
    token.
    """
    return states.squeeze(0).transpose(0, 1).flatten(1)


def packed_states(body: Any, input_ids_T: Tensor, position_ids_T: Tensor, rows: Rows) -> Tensor:
    """Return the last hidden states [T, H] of a transformers model without its head, computed packed."""
    output = body(
        input_ids=input_ids_T[None],
        position_ids=position_ids_T[None],
        # Given a four-dimensional mask, transformers makes no mask of its own. `packed_attention` ignores this mask.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids_T.device),
        use_cache=False,
        rows=rows,
    )
    return output.last_hidden_state[0]  # type: ignore[no-any-return]


def separate_states(body: Any, input_ids_T: Tensor, rows: Rows) -> Tensor:
    """Return the last hidden states [T, H], each row computed separately.

    Models that mix tokens not only by attention, but for example by convolutions, need this.
    """
    results = [
        body(input_ids=input_ids_RL, use_cache=False).last_hidden_state.flatten(0, 1)
        for input_ids_RL in rows.split(input_ids_T[rows.laid_out.index])
    ]
    return gathered(torch.cat(results), rows.packed)


@torch.no_grad()
def longest_packed(body: Any, device: torch.device) -> int:
    """Return the length of the longest row that the model can compute packed: 0 for no row, sys.maxsize for all.

    The test computes two rows with a common prompt twice: with the model's own window, and with a window shorter than
    the rows.
    """
    config = body.config
    if not _ATTENTION_LAYERS.issuperset(getattr(config, "layer_types", None) or ()):
        return 0
    expected, found = _probed(body, device)
    if found is None or not _equal(found, expected):
        return 0
    windows = [getattr(config, key, None) for key in ("sliding_window", "attention_chunk_size")]
    longest = min((window for window in windows if window), default=sys.maxsize)
    if longest < sys.maxsize:
        with _windows_of(body, _PROBED_WINDOW):
            windowed, found = _probed(body, device)
        if found is not None and _equal(found, windowed) and not _equal(windowed, expected):
            return sys.maxsize
    return longest


def _probed(body: Any, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the states of separate and of packed rows. None: the model rejects `rows` or a four-dimensional mask."""
    ids = torch.arange(7, device=device) % body.config.vocab_size
    position_ids = torch.tensor([0, 1, 2, 3, 4, 2, 3], device=device)
    rows = Rows.of([np.array([[0, 1, 2, 3, 4], [0, 1, 5, 6, 6]])], np.array([0, 1, 2, 3, 4, 7, 8])).to(device)
    expected = separate_states(body, ids, rows)
    try:
        return expected, packed_states(body, ids, position_ids, rows)
    except (TypeError, ValueError, RuntimeError):
        return expected, None


def _equal(found: Tensor, expected: Tensor) -> bool:
    error = (found - expected).abs().max() / expected.abs().max()
    return bool(error < _TOLERANCE[expected.dtype])


@contextmanager
def _windows_of(body: Any, window: int) -> Iterator[None]:
    """Within the `with` block, give all layers with a sliding window a window of `window` tokens."""
    holders = [body.config, *body.modules()]
    before = [(holder, holder.sliding_window) for holder in holders if getattr(holder, "sliding_window", None)]
    for holder, _ in before:
        holder.sliding_window = window
    try:
        yield
    finally:
        for holder, own in before:
            holder.sliding_window = own
