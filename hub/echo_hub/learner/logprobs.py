"""Log-probabilities of given tokens, without ever holding [tokens, vocabulary] in full.

The head is frozen, and each token's log-probability depends on its own hidden vector alone. So the forward pass, while
it has a chunk's probabilities p at hand, also notes the gradient of each log-probability,

    d log p_id / d hidden = (onehot(id) - p) W / temperature,

which is as large as the hidden vectors themselves; the backward pass only scales it. That takes two products with the
head where recomputing the logits takes three, and keeps one chunk of logits at a time.

The same probabilities say where a token's interval of the cumulative distribution lies, in which the u that it was
drawn with must be (`echo_shared.draws`). Of a large vocabulary whole blocks are summed, and only the token's own block
is looked at in full: it costs one more look at each chunk, beside two products with the head.

Of the same logits z the policy's entropy at each place is log Σ exp z - Σ z exp z / Σ exp z. Its second sum needs z
beside exp z, so it is taken of a few rows at a time: no second chunk is ever held. Where it is trained, the pass notes
its gradient as well, which takes a third product with the head:

    d H / d hidden = -Σ_v p_v (log p_v + H) W_v / temperature

Dimensions: N tokens, H hidden size, V vocabulary, B tokens in a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from echo_shared import torch_draws

CHUNK_ELEMENTS: Final = {"cpu": 2**23, "cuda": 2**27, "mps": 2**25}
"""Logits that exist at once, by device: 32 MiB in float32 on a CPU, whose caches are small; 512 MiB on CUDA, where a
product needs about a thousand rows to keep the device busy."""
CAST_ELEMENTS: Final = 2**20
"""Elements of a bfloat16 head in float32 at once, where the device has no product of mixed precision: 4 MiB."""
EXPONENT_ELEMENTS: Final = {"cpu": 2**17, "cuda": 2**23, "mps": 2**21}
"""Logits that exist beside their exponentials at once, by device: as many as its caches hold."""
_BLOCK: Final = 1_024


class Screened(NamedTuple):
    """What one pass says of given tokens, all [N] and of one dtype; the first has a graph, and the last if its gradient
    is asked for."""

    logprobs_N: Tensor
    """Nats."""
    distances_N: Tensor
    """How far u lies outside of the token's interval, in cumulative probability: 0 inside, NaN where u is."""
    entropies_N: Tensor
    """Of the whole distribution that the token was drawn from, nats."""


def selected_logprobs(
    hidden_NH: Tensor, head: nn.Linear, ids_N: Tensor, *, temperature: float, chunk_elements: int | None = None
) -> Tensor:
    """log softmax(head(hidden) / temperature) at `ids_N`: nats [N], float32 (or float64, if `hidden_NH` is).

    `head` is the model's output layer; it gets no gradient.
    """
    return _apply(hidden_NH, head, ids_N, None, temperature, chunk_elements, entropy_gradient=False)[0]


def screened_logprobs(
    hidden_NH: Tensor,
    head: nn.Linear,
    ids_N: Tensor,
    uniforms_N: Tensor,
    *,
    temperature: float,
    entropy_gradient: bool = False,
    chunk_elements: int | None = None,
) -> Screened:
    """As `selected_logprobs`, and what the same logits say beside; `uniforms_N`: what each token was drawn with."""
    return _apply(hidden_NH, head, ids_N, uniforms_N, temperature, chunk_elements, entropy_gradient=entropy_gradient)


def _apply(
    hidden_NH: Tensor,
    head: nn.Linear,
    ids_N: Tensor,
    uniforms_N: Tensor | None,
    temperature: float,
    chunk_elements: int | None,
    *,
    entropy_gradient: bool,
) -> Screened:
    chunk = max(1, (chunk_elements or CHUNK_ELEMENTS[hidden_NH.device.type]) // head.weight.shape[0])
    found: tuple[Tensor, Tensor, Tensor] = _SelectedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head.weight, head.bias, ids_N, uniforms_N, temperature, chunk, entropy_gradient
    )
    return Screened(*found)


def _exponentiate(logits_NV: Tensor) -> Tensor:
    """Puts exp z in the place of the logits z; Σ z exp z [N, 1]."""
    rows = max(1, EXPONENT_ELEMENTS[logits_NV.device.type] // logits_NV.shape[1])
    sums_N1 = logits_NV.new_empty(len(logits_NV), 1)
    for part in _parts(len(logits_NV), rows):
        logits = logits_NV[part].clone()
        sums_N1[part, 0] = torch.linalg.vecdot(logits, logits_NV[part].exp_())
    return sums_N1


def _to_entropy_error(p_NV: Tensor, entropies_N1: Tensor) -> None:
    """Puts p (log p + H) in the place of the probabilities p; 0 where p is 0."""
    rows = max(1, EXPONENT_ELEMENTS[p_NV.device.type] // p_NV.shape[1])
    for part in _parts(len(p_NV), rows):
        products = torch.xlogy(p_NV[part], p_NV[part])
        p_NV[part].mul_(entropies_N1[part]).add_(products)


def _outside(weights_NV: Tensor, total_N1: Tensor, ids_N1: Tensor, uniforms_N: Tensor) -> Tensor:
    """How far u lies outside of the token's interval [N], where `weights_NV` are probabilities times their total."""
    size = weights_NV.shape[1]
    block_N1 = ids_N1 // _BLOCK
    below_N1 = torch.zeros_like(total_N1)
    if size > _BLOCK:
        sums = weights_NV[:, : size // _BLOCK * _BLOCK].unflatten(1, (-1, _BLOCK)).sum(dim=2).cumsum(dim=1)
        below_N1 = sums.gather(1, (block_N1 - 1).clamp(min=0)).masked_fill_(block_N1 == 0, 0.0)
    columns_NB = block_N1 * _BLOCK + torch.arange(min(size, _BLOCK), device=ids_N1.device)
    own_NB = weights_NV.gather(1, columns_NB.clamp(max=size - 1))
    below_N1 = below_N1 + own_NB.masked_fill_(columns_NB >= ids_N1, 0.0).sum(dim=1, keepdim=True)
    target_N1 = uniforms_N[:, None] * total_N1
    above_N1 = target_N1 - below_N1 - weights_NV.gather(1, ids_N1)
    return (torch.maximum(below_N1 - target_N1, above_N1).clamp_(min=0) / total_N1).squeeze(1)


@torch.no_grad()
def intervals(
    hidden_NH: Tensor, head: nn.Linear, ids_N: Tensor, greedy_N: Tensor | None = None, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """`torch_draws.interval` of `ids_N` under softmax(head(hidden) / temperature): [N] and [N], float64; of greedy
    choices `torch_draws.shortfall` in place of the interval's beginning.

    Computed on the device of `hidden_NH`, or on the CPU where that has no float64.
    """
    found = []
    for part, logits in logits_in_chunks(hidden_NH, head):
        ids = exact(ids_N[part])
        temperatures = torch.full(ids.shape, temperature, dtype=torch.float64, device=ids.device)
        below, true = torch_draws.interval(logits, ids, temperatures)
        if greedy_N is not None:
            below = torch.where(exact(greedy_N[part]), torch_draws.shortfall(logits, ids, temperatures), below)
        found.append((below, true))
    below_N, logprobs_N = zip(*found, strict=True)
    return torch.cat(below_N), torch.cat(logprobs_N)


def logits_in_chunks(hidden_NH: Tensor, head: nn.Linear) -> Iterator[tuple[slice, Tensor]]:
    """Rows of `hidden_NH`, and their logits in float32, which are overwritten by the next ones."""
    chunk = max(1, CHUNK_ELEMENTS[hidden_NH.device.type] // head.weight.shape[0])
    buffer = _buffer(hidden_NH, head.weight, chunk)
    for part in _parts(len(hidden_NH), chunk):
        yield part, _logits(hidden_NH[part], head.weight, head.bias, out=buffer)


def exact(values: Tensor) -> Tensor:
    """`values` where float64 can be computed: on their device, or on the CPU."""
    return values.cpu() if values.device.type == "mps" else values


def _parts(count: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, count, chunk))


def _buffer(hidden_NH: Tensor, weight_VH: Tensor, chunk: int) -> Tensor:
    """One for all chunks of logits: a large one that is allocated anew costs the system as many fresh pages each
    time."""
    exact = torch.promote_types(hidden_NH.dtype, torch.float32)
    return weight_VH.new_empty(min(chunk, len(hidden_NH)), weight_VH.shape[0], dtype=exact)


def _logits(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, *, out: Tensor) -> Tensor:
    """The chunk's logits [N, V], in the beginning of `out`."""
    logits = out[: len(hidden_NH)]
    _product(hidden_NH.to(weight_VH.dtype), weight_VH, out=logits)
    return logits if bias_V is None else logits.add_(bias_V)


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
        uniforms_N: Tensor | None,
        temperature: float,
        chunk: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact = torch.promote_types(hidden_NH.dtype, torch.float32)
        logprobs_N = torch.empty(len(ids_N), dtype=exact, device=hidden_NH.device)
        distances_N, entropies_N = (logprobs_N.new_empty(0 if uniforms_N is None else len(ids_N)) for _ in range(2))
        wanted = 1 + entropy_gradient if ctx.needs_input_grad[0] else 0
        gradients = [torch.empty_like(hidden_NH) for _ in range(wanted)]
        buffer = _buffer(hidden_NH, weight_VH, chunk)
        for part in _parts(len(ids_N), chunk):
            ids = ids_N[part, None]
            logits = _logits(hidden_NH[part], weight_VH, bias_V, out=buffer).div_(temperature)
            peak = logits.amax(dim=1, keepdim=True)
            selected = logits.gather(1, ids)
            sums = _exponentiate(logits.sub_(peak)) if uniforms_N is not None else logits.sub_(peak).exp_()
            total = logits.sum(dim=1, keepdim=True)
            logprobs_N[part] = (selected - peak - total.log()).squeeze(1)
            if uniforms_N is not None:
                entropies_N[part] = (total.log() - sums / total).squeeze(1)
                distances_N[part] = _outside(logits, total, ids, uniforms_N[part].to(exact))
            if not gradients:
                continue
            own = logits.div_(total).gather(1, ids)
            # Subtracted before it is rounded to the head's type: near p = 1 the difference is all there is.
            error = logits.scatter_add_(1, ids, -torch.ones_like(total)).to(weight_VH.dtype)
            gradients[0][part] = torch.mm(error, weight_VH).div_(-temperature)
            if entropy_gradient:
                _to_entropy_error(logits.scatter_(1, ids, own), entropies_N[part, None])
                gradients[1][part] = torch.mm(logits.to(weight_VH.dtype), weight_VH).div_(-temperature)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(distances_N, *([] if entropy_gradient else [entropies_N]))
        return logprobs_N, distances_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *gradients: Any) -> tuple[Tensor | None, ...]:
        gradient_N, _, entropy_gradient_N = gradients
        gradient_NH, *of_entropy = ctx.saved_tensors
        total_NH = gradient_NH * gradient_N[:, None]
        for entropy_gradient_NH in of_entropy:
            total_NH = total_NH + entropy_gradient_NH * entropy_gradient_N[:, None]
        return total_NH.to(gradient_NH.dtype), *[None] * 7
