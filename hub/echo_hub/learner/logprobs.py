"""Log-probabilities of given tokens, without ever holding [tokens, vocabulary] in full.

Dimensions: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS: Final = 2**26
"""Logits that exist at once: 256 MiB in float32."""


def selected_logprobs(
    hidden_NH: Tensor,
    head: nn.Linear,
    ids_N: Tensor,
    *,
    temperature: float,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """log softmax(head(hidden) / temperature) at `ids_N`: float32 nats [N].

    `head` is the model's output layer. Chunks of tokens go through it one after the other; the backward pass computes
    their logits again.
    """
    chunk = max(1, chunk_elements // head.weight.shape[0])
    parts = [
        checkpoint(_logprobs, hidden, head, ids, temperature, use_reentrant=False, preserve_rng_state=False)
        for hidden, ids in zip(torch.split(hidden_NH, chunk), torch.split(ids_N, chunk), strict=True)
    ]
    return torch.cat(parts)


def _logprobs(hidden_NH: Tensor, head: nn.Linear, ids_N: Tensor, temperature: float) -> Tensor:
    logits_NV = head(hidden_NH).float() / temperature
    selected: Tensor = logits_NV.gather(1, ids_N[:, None]).squeeze(1) - logits_NV.logsumexp(dim=-1)
    return selected
