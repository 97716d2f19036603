"""`echo_shared.draws.draw` in torch: many rows at once, each with its temperature, wherever the logits are.

The same float64 arithmetic as the reference. A large vocabulary is summed by blocks, and only the block that holds the
token is accumulated, which reorders additions: the sums differ by parts in 1e16. Nothing here waits for the device.

Dimensions: R rows, V vocabulary, B tokens in a block.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_BLOCK: Final = 1_024
_CHUNK_VALUES: Final = {"cpu": 2**17}
"""Logits drawn from at a time: on a CPU, what stays in a core's cache as float64."""
_DEVICE_CHUNK_VALUES: Final = 2**24


def draw(logits_RV: Tensor, u_R: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    """Draws one token a row; `u_R` and `temperature_R` are float64.

    Returns ids [R] (int64) and logprobs [R] (float64, nats), on the device of `u_R`; NaN where logits are not finite.
    """
    chunk = max(1, _CHUNK_VALUES.get(u_R.device.type, _DEVICE_CHUNK_VALUES) // logits_RV.shape[-1])
    parts = zip(*(torch.split(value, chunk) for value in (logits_RV, u_R, temperature_R)), strict=True)
    drawn = [_draw(*part) for part in parts]
    if len(drawn) == 1:
        return drawn[0]
    tokens, logprobs = zip(*drawn, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def most_likely(logits_RV: Tensor, _u_R: Tensor, _temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token of each row [R], and its log-probability [R] in nats: the greedy counterpart of `draw`."""
    logprobs_R, tokens_R = logits_RV.float().log_softmax(dim=-1).max(dim=-1)
    return tokens_R, logprobs_R


def _draw(logits_RV: Tensor, u_R: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    vocabulary = logits_RV.shape[1]
    weights_RV = logits_RV.to(device=u_R.device, dtype=torch.float64, copy=True).div_(temperature_R[:, None])
    top_R1 = weights_RV.amax(dim=1, keepdim=True)
    weights_RV.sub_(top_R1).exp_()
    if vocabulary <= _BLOCK:
        cumulative_RV = weights_RV.cumsum(dim=1)
        totals_R1 = cumulative_RV[:, -1:]
        tokens_R1 = _first_above(cumulative_RV, u_R[:, None] * totals_R1)
    else:
        tokens_R1, totals_R1 = _draw_by_blocks(weights_RV, u_R)
    tokens_R1 = tokens_R1.clamp_(max=vocabulary - 1)  # NaN is above nothing.
    drawn_R1 = logits_RV.gather(1, tokens_R1.to(logits_RV.device)).to(device=u_R.device, dtype=torch.float64)
    logprobs_R1 = drawn_R1 / temperature_R[:, None] - top_R1 - totals_R1.log()
    return tokens_R1.squeeze(1), logprobs_R1.squeeze(1)


def _draw_by_blocks(weights_RV: Tensor, u_R: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [R, 1] and the weights' totals [R, 1]."""
    vocabulary = weights_RV.shape[1]
    whole = vocabulary // _BLOCK * _BLOCK
    sums = weights_RV[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=2)
    if whole < vocabulary:
        sums = torch.cat([sums, weights_RV[:, whole:].sum(dim=1, keepdim=True)], dim=1)
    blocks = sums.cumsum(dim=1)
    totals_R1 = blocks[:, -1:]
    target_R1 = u_R[:, None] * totals_R1
    block_R1 = _first_above(blocks, target_R1).clamp_(max=blocks.shape[1] - 1)
    before_R1 = blocks.gather(1, (block_R1 - 1).clamp_(min=0)).masked_fill_(block_R1 == 0, 0.0)
    ids_RB = block_R1 * _BLOCK + torch.arange(_BLOCK, device=weights_RV.device)
    inside_RB = weights_RV.gather(1, ids_RB.clamp(max=vocabulary - 1)).masked_fill_(ids_RB >= vocabulary, 0.0)
    tokens_R1 = block_R1 * _BLOCK + _first_above(before_R1 + inside_RB.cumsum(dim=1), target_R1)
    return tokens_R1, totals_R1


def _first_above(cumulative_RN: Tensor, target_R1: Tensor) -> Tensor:
    """[R, 1]; where rounding leaves nothing above the target, the last place that adds anything."""
    last_R1 = torch.searchsorted(cumulative_RN, cumulative_RN[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulative_RN, target_R1.contiguous(), right=True), last_R1)
