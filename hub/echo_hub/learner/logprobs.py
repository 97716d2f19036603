"""Log-probabilities of given tokens, without ever holding [tokens, vocabulary] in full.

The head is frozen, and each token's log-probability depends on its own hidden vector alone. So the forward pass, while
it has a chunk's probabilities p at hand, also notes the gradient of each log-probability,

    d log p_id / d hidden = (onehot(id) - p) W / temperature,

which is as large as the hidden vectors themselves; the backward pass only scales it. That takes two products with the
head where recomputing the logits takes three, and keeps one chunk of logits at a time.

Dimensions: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

CHUNK_ELEMENTS: Final = {"cpu": 2**23, "cuda": 2**27, "mps": 2**25}
"""Logits that exist at once, by device: 32 MiB in float32 on a CPU, whose caches are small; 512 MiB on CUDA, where a
product needs about a thousand rows to keep the device busy."""
CAST_ELEMENTS: Final = 2**20
"""Elements of a bfloat16 head in float32 at once, where the device has no product of mixed precision: 4 MiB."""


def selected_logprobs(
    hidden_NH: Tensor, head: nn.Linear, ids_N: Tensor, *, temperature: float, chunk_elements: int | None = None
) -> Tensor:
    """log softmax(head(hidden) / temperature) at `ids_N`: nats [N], float32 (or float64, if `hidden_NH` is).

    `head` is the model's output layer; it gets no gradient.
    """
    elements = chunk_elements or CHUNK_ELEMENTS[hidden_NH.device.type]
    chunk = max(1, elements // head.weight.shape[0])
    logprobs: Tensor = _SelectedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head.weight, head.bias, ids_N, temperature, chunk
    )
    return logprobs


def _product(hidden_NH: Tensor, weight_VH: Tensor, *, out: Tensor) -> None:
    """hidden · weightᵀ in `out`'s precision, which may be above that of the two.

    A logit rounded to bfloat16 is off by up to 2^-9 of itself: log-probabilities by hundredths.
    """
    if weight_VH.dtype == out.dtype:
        torch.mm(hidden_NH, weight_VH.T, out=out)
    elif out.is_cuda:
        torch.mm(hidden_NH, weight_VH.T, out_dtype=out.dtype, out=out)
    else:
        exact_NH = hidden_NH.to(out.dtype)
        rows = max(1, CAST_ELEMENTS // weight_VH.shape[1])
        for start in range(0, len(weight_VH), rows):
            part = slice(start, start + rows)
            torch.mm(exact_NH, weight_VH[part].to(out.dtype).T, out=out[:, part])


class _Context(FunctionCtx):
    """What autograd adds to it, for the type checker."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]


class _SelectedLogprobs(Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        ids_N: Tensor,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        exact = torch.promote_types(hidden_NH.dtype, torch.float32)
        logprobs_N = torch.empty(len(ids_N), dtype=exact, device=hidden_NH.device)
        gradient_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        # One buffer for all chunks: a large one that is allocated anew costs the system as many fresh pages each time.
        buffer = weight_VH.new_empty(min(chunk, len(ids_N)), weight_VH.shape[0], dtype=exact)
        for start in range(0, len(ids_N), chunk):
            part = slice(start, start + chunk)
            ids = ids_N[part, None]
            logits = buffer[: len(ids)]
            _product(hidden_NH[part].to(weight_VH.dtype), weight_VH, out=logits)
            if bias_V is not None:
                logits.add_(bias_V)
            logits.div_(temperature)
            peak = logits.amax(dim=1, keepdim=True)
            selected = logits.gather(1, ids)
            total = logits.sub_(peak).exp_().sum(dim=1, keepdim=True)
            logprobs_N[part] = (selected - peak - total.log()).squeeze(1)
            if gradient_NH is not None:
                # Subtracted before it is rounded to the head's type: near p = 1 the difference is all there is.
                error = logits.div_(total).scatter_add_(1, ids, -torch.ones_like(total)).to(weight_VH.dtype)
                gradient_NH[part] = torch.mm(error, weight_VH).div_(-temperature)
        if gradient_NH is not None:
            ctx.save_for_backward(gradient_NH)
        return logprobs_N

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient_N,) = gradients
        (gradient_NH,) = ctx.saved_tensors
        return (gradient_NH * gradient_N[:, None]).to(gradient_NH.dtype), None, None, None, None, None
