"""Log-probabilities of given tokens, without ever holding all [tokens, vocabulary] logits.

The output layer (head) is frozen, and each token's log-probability depends only on its own hidden vector. So while the
forward pass holds a chunk's probabilities p, it also stores the gradient of each log-probability,

    d log p_id / d hidden = ((onehot(id) - p) · dz/dx) W / temperature,

which has the shape of the hidden vectors. Here x are the head's values and z the logits: dz/dx is 1 for most models, s
for logits scaled by s, and s (1 - (z / c)²) for logits also capped at ± c (`Head`). The backward pass only scales this
gradient. This needs two products with the head; recomputing the logits in the backward pass would need three. Only one
chunk of logits exists at a time.

The same probabilities give each token's interval of the cumulative distribution. The interval must contain u, the
uniform random number that drew the token (`echo_shared.sampling.draws`). A large vocabulary is summed in blocks, and
only the block that holds the token is summed element by element. This reads each chunk once more, which is cheap next
to two products.

The policy's entropy at each position is log Σ exp z - Σ z exp z / Σ exp z for logits z. The second sum needs both z and
exp z, so it is computed for a few rows at a time, without a second chunk. If the entropy is trained, the pass also
stores its gradient, with a third product:

    d H / d hidden = -Σ_v p_v (log p_v + H) · dz_v/dx_v · W_v / temperature

Dimensions: N tokens, H hidden size, V vocabulary, B tokens in a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from echo_hub.learner.head import Head
from echo_shared.sampling import torch_draws

CHUNK_ELEMENTS: Final = {"cpu": 2**23, "cuda": 2**27, "mps": 2**25}
"""Logits held at once, by device. 32 MiB in float32 on a CPU, whose caches are small. 512 MiB on CUDA, where a
product needs about a thousand rows to keep the device busy."""
CAST_ELEMENTS: Final = 2**20
"""Elements of a bfloat16 head cast to float32 at once (4 MiB), on devices without mixed-precision products."""
EXPONENT_ELEMENTS: Final = {"cpu": 2**17, "cuda": 2**23, "mps": 2**21}
"""Logits held together with their exponentials, by device: as many as fit into the device's caches."""
_CAPPED_COPIES: Final = 3
"""Tensors of a chunk's size that capped logits need: the logits, the cap's derivative, and the product of both."""
_BLOCK: Final = 1_024


class Screened(NamedTuple):
    """Results of one pass for given tokens, all [N] and of one dtype.

    `logprobs_N` has an autograd graph; `entropies_N` has one if its gradient is requested.
    """

    logprobs_N: Tensor
    """Log-probabilities of the given tokens, in nats."""
    distances_N: Tensor
    """Distance of the uniform number u from the interval of cumulative probability that draws the token: 0 inside the
    interval, NaN if u is NaN."""
    entropies_N: Tensor
    """Entropy of the distribution from which the token was drawn, in nats."""


def selected_logprobs(
    hidden_NH: Tensor, head: Head, ids_N: Tensor, *, temperature: float, chunk_elements: int | None = None
) -> Tensor:
    """Return log softmax(head(hidden) / temperature) at `ids_N`: nats [N], float32 (float64 if `hidden_NH` is).

    `head` is the model's output layer; it gets no gradient.
    """
    return _apply(hidden_NH, head, ids_N, None, temperature, chunk_elements, entropy_gradient=False)[0]


def screened_logprobs(
    hidden_NH: Tensor,
    head: Head,
    ids_N: Tensor,
    uniforms_N: Tensor,
    *,
    temperature: float,
    entropy_gradient: bool = False,
    chunk_elements: int | None = None,
) -> Screened:
    """Return `selected_logprobs` and the other fields of `Screened`, computed from the same logits. `uniforms_N` holds
    the uniform number u with which each token was drawn.
    """
    return _apply(hidden_NH, head, ids_N, uniforms_N, temperature, chunk_elements, entropy_gradient=entropy_gradient)


def weighted_logprobs(
    hidden_NH: Tensor, head: Head, ids_NK: Tensor, weights_NK: Tensor, *, chunk_elements: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of several ids at each position, at temperature 1, [N, K] without a graph, and their
    weighted sums over K, [N], with one. Types are those of `selected_logprobs`.

    The weights are known before the pass, so K ids need only one gradient: d Σ w log p = (Σ w onehot(id) - p Σ w) W.
    """
    chunk = _rows_at_once(hidden_NH, head, chunk_elements)
    found: tuple[Tensor, Tensor] = _WeightedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head, ids_NK, weights_NK, chunk
    )
    return found


def _rows_at_once(hidden_NH: Tensor, head: Head, chunk_elements: int | None) -> int:
    elements = chunk_elements or CHUNK_ELEMENTS[hidden_NH.device.type]
    if head.cap is not None:
        elements //= _CAPPED_COPIES
    return max(1, elements // head.weight.shape[0])


def _apply(
    hidden_NH: Tensor,
    head: Head,
    ids_N: Tensor,
    uniforms_N: Tensor | None,
    temperature: float,
    chunk_elements: int | None,
    *,
    entropy_gradient: bool,
) -> Screened:
    chunk = _rows_at_once(hidden_NH, head, chunk_elements)
    found: tuple[Tensor, Tensor, Tensor] = _SelectedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head, ids_N, uniforms_N, temperature, chunk, entropy_gradient
    )
    return Screened(*found)


def _exponentiate(logits_NV: Tensor, peaks_N1: Tensor, temperature: float) -> Tensor:
    """Replace the logits by exp z in place, for z = logits / temperature - peaks. Return Σ z exp z [N, 1].

    A few rows at a time go through all steps, because they stay in the device's caches.
    """
    rows = max(1, EXPONENT_ELEMENTS[logits_NV.device.type] // logits_NV.shape[1])
    sums_N1 = logits_NV.new_empty(len(logits_NV), 1)
    for part in _parts(len(logits_NV), rows):
        z = _scale(logits_NV[part], temperature) - peaks_N1[part]
        sums_N1[part, 0] = z.mul_(torch.exp(z, out=logits_NV[part])).sum(dim=1)
    return sums_N1


def _scale(logits: Tensor, temperature: float) -> Tensor:
    """Divide by the temperature in place; skip the pass over memory at temperature 1."""
    return logits if temperature == 1.0 else logits.div_(temperature)


def _to_entropy_error(p_NV: Tensor, entropies_N1: Tensor) -> None:
    """Replace the probabilities p by p (log p + H) in place; 0 where p is 0. H (`entropies_N1`) is the entropy of each
    row.
    """
    rows = max(1, EXPONENT_ELEMENTS[p_NV.device.type] // p_NV.shape[1])
    for part in _parts(len(p_NV), rows):
        products = torch.xlogy(p_NV[part], p_NV[part])
        p_NV[part].mul_(entropies_N1[part]).add_(products)


def _outside(weights_NV: Tensor, total_N1: Tensor, ids_N1: Tensor, uniforms_N: Tensor) -> Tensor:
    """Return the distance [N] of each token's random number u from the interval of cumulative probability that draws
    the token. `weights_NV` are probabilities times `total_N1`.
    """
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
    hidden_NH: Tensor, head: Head, ids_N: Tensor, greedy_N: Tensor | None = None, *, temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return, for each token of `ids_N`, the lower end of the interval of cumulative probability that draws it, and its
    log-probability (`torch_draws.interval`) under softmax(head(hidden) / temperature): two float64 tensors [N].

    Where `greedy_N` is true, `torch_draws.shortfall` replaces the interval's lower end. `temperature` may be a tensor
    [N], one for each token. Computed on the device of `hidden_NH`, or on the CPU if that lacks float64.
    """
    found = []
    for part, logits in logits_in_chunks(hidden_NH, head):
        ids = exact(ids_N[part])
        if isinstance(temperature, Tensor):
            temperatures = temperature[part].to(device=ids.device, dtype=torch.float64)
        else:
            temperatures = torch.full(ids.shape, temperature, dtype=torch.float64, device=ids.device)
        below, true = torch_draws.interval(logits, ids, temperatures)
        if greedy_N is not None:
            below = torch.where(exact(greedy_N[part]), torch_draws.shortfall(logits, ids, temperatures), below)
        found.append((below, true))
    below_N, logprobs_N = zip(*found, strict=True)
    return torch.cat(below_N), torch.cat(logprobs_N)


def logits_in_chunks(hidden_NH: Tensor, head: Head) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows with their float32 logits. The logits are valid until the next chunk, which
    overwrites them.
    """
    chunk = max(1, CHUNK_ELEMENTS[hidden_NH.device.type] // head.weight.shape[0])
    buffer = _buffer(hidden_NH, head.weight, chunk)
    for part in _parts(len(hidden_NH), chunk):
        yield part, _logits(hidden_NH[part], head, out=buffer)


def exact(values: Tensor) -> Tensor:
    """Return `values` on a device that supports float64: their own, or the CPU."""
    return values.cpu() if values.device.type == "mps" else values


def _parts(count: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, count, chunk))


def _buffer(hidden_NH: Tensor, weight_VH: Tensor, chunk: int) -> Tensor:
    """Allocate one buffer for the logits of all chunks. A new buffer for each chunk would cost page faults for all its
    memory again.
    """
    exact = torch.promote_types(hidden_NH.dtype, torch.float32)
    return weight_VH.new_empty(min(chunk, len(hidden_NH)), weight_VH.shape[0], dtype=exact)


def _logits(hidden_NH: Tensor, head: Head, *, out: Tensor) -> Tensor:
    logits = out[: len(hidden_NH)]
    _product(hidden_NH.to(head.weight.dtype), head.weight, out=logits)
    return head.finish(logits if head.bias is None else logits.add_(head.bias))


def _slopes(logits_NV: Tensor, cap: float | None) -> Tensor | None:
    """Return the derivative of capped logits, 1 - (z / c)² [N, V]; None without a cap."""
    return None if cap is None else torch.div(logits_NV, cap).square_().neg_().add_(1.0)


def _product(hidden_NH: Tensor, weight_VH: Tensor, *, out: Tensor) -> None:
    """Compute hidden · weightᵀ in the precision of `out`, which may exceed that of the factors.

    Rounding a logit to bfloat16 has a relative error of up to 2^-9, which shifts log-probabilities by hundredths.
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
    """The context object of a custom autograd function. Declares its attributes for the type checker."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]


class _SelectedLogprobs(Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden_NH: Tensor,
        head: Head,
        ids_N: Tensor,
        uniforms_N: Tensor | None,
        temperature: float,
        chunk: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weight_VH = head.weight
        exact = torch.promote_types(hidden_NH.dtype, torch.float32)
        logprobs_N = torch.empty(len(ids_N), dtype=exact, device=hidden_NH.device)
        distances_N, entropies_N = (logprobs_N.new_empty(0 if uniforms_N is None else len(ids_N)) for _ in range(2))
        wanted = 1 + entropy_gradient if ctx.needs_input_grad[0] else 0
        gradients = [torch.empty_like(hidden_NH) for _ in range(wanted)]
        buffer = _buffer(hidden_NH, weight_VH, chunk)
        for part in _parts(len(ids_N), chunk):
            ids = ids_N[part, None]
            logits = _logits(hidden_NH[part], head, out=buffer)
            slopes = _slopes(logits, head.cap) if gradients else None
            peak = _scale(logits.amax(dim=1, keepdim=True), temperature)
            selected = _scale(logits.gather(1, ids), temperature)
            if uniforms_N is None:
                _scale(logits, temperature).sub_(peak).exp_()
            else:
                sums = _exponentiate(logits, peak, temperature)
            total = logits.sum(dim=1, keepdim=True)
            logprobs_N[part] = (selected - peak - total.log()).squeeze(1)
            if uniforms_N is not None:
                entropies_N[part] = (total.log() - sums / total).squeeze(1)
                distances_N[part] = _outside(logits, total, ids, uniforms_N[part].to(exact))
            if not gradients:
                continue
            own = logits.gather(1, ids).div_(total)
            if slopes is not None:
                error = logits.div_(total).scatter(1, ids, own - 1).mul_(slopes).to(weight_VH.dtype)
            elif logits.is_cuda and logits.dtype != weight_VH.dtype and not entropy_gradient:
                # One kernel divides and rounds.
                error = torch.div(logits, total, out=torch.empty_like(logits, dtype=weight_VH.dtype))
            else:
                error = logits.div_(total).to(weight_VH.dtype)
            if slopes is None:
                # Compute p - 1 before rounding to the head's dtype: if p is near 1, rounding p first would lose the
                # small difference.
                error.scatter_(1, ids, (own - 1).to(error.dtype))
            gradients[0][part] = torch.mm(error, weight_VH).div_(-temperature / head.scale)
            if entropy_gradient:
                _to_entropy_error(logits.scatter_(1, ids, own), entropies_N[part, None])
                if slopes is not None:
                    logits.mul_(slopes)
                gradients[1][part] = torch.mm(logits.to(weight_VH.dtype), weight_VH).div_(-temperature / head.scale)
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
        return total_NH.to(gradient_NH.dtype), *[None] * 6


class _WeightedLogprobs(Function):
    @staticmethod
    def forward(
        ctx: _Context, hidden_NH: Tensor, head: Head, ids_NK: Tensor, weights_NK: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        weight_VH = head.weight
        exact = torch.promote_types(hidden_NH.dtype, torch.float32)
        weights_NK = weights_NK.to(exact)
        logprobs_NK = torch.empty(ids_NK.shape, dtype=exact, device=hidden_NH.device)
        gradient_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        buffer = _buffer(hidden_NH, weight_VH, chunk)
        for part in _parts(len(ids_NK), chunk):
            ids, weights = ids_NK[part], weights_NK[part]
            logits = _logits(hidden_NH[part], head, out=buffer)
            slopes = None if gradient_NH is None else _slopes(logits, head.cap)
            peak = logits.amax(dim=1, keepdim=True)
            selected = logits.gather(1, ids)
            total = logits.sub_(peak).exp_().sum(dim=1, keepdim=True)
            logprobs_NK[part] = selected - peak - total.log()
            if gradient_NH is None:
                continue
            error = logits.mul_(weights.sum(dim=1, keepdim=True) / total).scatter_add_(1, ids, -weights)
            if slopes is not None:
                error.mul_(slopes)
            gradient_NH[part] = torch.mm(error.to(weight_VH.dtype), weight_VH).mul_(-head.scale)
        if gradient_NH is not None:
            ctx.save_for_backward(gradient_NH)
        ctx.mark_non_differentiable(logprobs_NK)
        return logprobs_NK, (weights_NK * logprobs_NK).sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *gradients: Any) -> tuple[Tensor | None, ...]:
        _, of_sums_N = gradients
        (gradient_NH,) = ctx.saved_tensors
        return (gradient_NH * of_sums_N[:, None]).to(gradient_NH.dtype), *[None] * 4
