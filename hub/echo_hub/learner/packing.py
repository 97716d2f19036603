"""Attention over a packed sequence: linear layers see each token once, attention sees rows.

A micro-batch is one sequence without padding: each prompt once, followed by its completions. Everything that a
transformer computes token by token (projections, norms, feed-forward) runs on that sequence. Only attention mixes
tokens. For attention, the sequence is gathered into rows of a prompt and one completion, computed causally without a
mask, and scattered back. So a prompt's tokens are computed once for all completions. The kernels are those of separate
rows.

Dimensions: T positions of the packed sequence, R rows of L positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION: Final = "echo_packed"
"""Value of `attn_implementation` for loading models; without rows it behaves like "sdpa"."""

_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest error, relative to the largest value, at which packed and separate rows count as equal. A model in which
packed rows influence each other has errors as large as the values themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The mapping between rows and the packed sequence."""

    positions_RL: tuple[Tensor, ...]
    """Positions in the packed sequence of each row's tokens, int64 [R, L], one tensor for rows of similar length.
    Padding repeats the last position.
    """
    places_T: Tensor
    """For each position of the packed sequence, the index of its result in all `positions_RL` concatenated. A prompt
    takes the result of its first row; its results in other rows are unused.
    """

    def to(self, device: torch.device) -> Rows:
        return Rows(
            positions_RL=tuple(positions.to(device) for positions in self.positions_RL),
            places_T=self.places_T.to(device),
        )

    @property
    def longest(self) -> int:
        return max(positions.shape[1] for positions in self.positions_RL)


def take(values_TF: Tensor, index: Tensor) -> Tensor:
    """Return `values_TF[index]`.

    Use the embedding function: its backward pass, which sums the gradients of repeated positions, is deterministic on
    every device and fastest on CPUs.
    """
    return embedding(index, values_TF)


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
    packed = [states[0].transpose(0, 1) for states in (query, key, value)]
    results = []
    for positions_RL in rows.positions_RL:
        laid_out = [
            take(states.flatten(1), positions_RL).unflatten(-1, states.shape[1:]).transpose(1, 2) for states in packed
        ]
        query_RL, key_RL, value_RL = laid_out
        result, _ = sdpa_attention_forward(module, query_RL, key_RL, value_RL, None, **kwargs)
        results.append(result.flatten(0, 1))
    together = torch.cat(results)
    return take(together.flatten(1), rows.places_T).unflatten(-1, together.shape[1:])[None], None


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
        body(input_ids=input_ids_T[positions_RL], use_cache=False).last_hidden_state.flatten(0, 1)
        for positions_RL in rows.positions_RL
    ]
    return take(torch.cat(results), rows.places_T)


@torch.no_grad()
def can_pack(body: Any, device: torch.device) -> bool:
    """Return True if the model computes the same for packed and separate rows, tested on two rows with a
    common prompt.
    """
    ids = torch.arange(7, device=device) % body.config.vocab_size
    position_ids = torch.tensor([0, 1, 2, 3, 4, 2, 3], device=device)
    rows = Rows(
        positions_RL=(torch.tensor([[0, 1, 2, 3, 4], [0, 1, 5, 6, 6]]),),
        places_T=torch.tensor([0, 1, 2, 3, 4, 7, 8]),
    ).to(device)
    expected = separate_states(body, ids, rows)
    try:
        found = packed_states(body, ids, position_ids, rows)
    except (TypeError, ValueError, RuntimeError):
        return False  # The model rejects `rows` or a four-dimensional mask.
    error = (found - expected).abs().max() / expected.abs().max()
    return bool(error < _TOLERANCE[expected.dtype])
