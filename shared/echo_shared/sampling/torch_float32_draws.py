"""Draws in float32 with a bound on the rounding error. `torch_draws.draw` repeats uncertain draws in float64.

The weight of token i is exp((x_i - x_max) / T). `block_sums` computes all weights in float32 and sums them by blocks.
`draw_with_margins` finds the block that u falls into, computes its weights again in float64 as the reference does, and
finds the token. So only the weights outside that block have float32's rounding. Let s be their sum and e = 2^-24, the
largest relative error of one rounding. Each weight w = exp(-a) outside the block has these errors:

- x - x_max, 1 / T and their product are rounded: a changes by at most 3 e a, so w changes by at most 3 e a w.
- exp is wrong by at most 2 ulp, so w changes by at most 4 e w. Sources: CUDA C++ Programming Guide, "Mathematical
  Functions" (expf: 2 ulp, 1 in newer versions); on CPUs, SLEEF's expf_u10 and MKL's HA mode (1 ulp).
- 8 weights are added in float32, in any order: 7 e w. All other sums are float64.

The errors add up to at most e (3 sum(a w) + 11 s). With n tokens in the vocabulary, sum(a w) <= s ln(n / s), because
among all weights with the sum s, equal weights have the largest entropy. The bound is e s (3 ln(n / s) + 12), where 12
in place of 11 covers products of errors, plus the rounding of the float64 reference: its sums are wrong by at most
n 2^-53 of the total weight, its quotients x / T by 2^-53 of themselves; four times that is added.

The distance from u to an edge of the token's interval, in units of weight, is wrong by at most the bound: if a weight
is wrong by d, the distance is wrong by (1 - u) d if the weight is below the edge, and by u d if it is above. So if both
edges are farther away than the bound, the token is certain.

Dimensions: R rows, V vocabulary, B tokens in a block.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 256
_IN_FLOAT32: Final = 8
"""Number of weights that are added in float32 at a time; these sums are then added in float64."""


def block_sums(logits_RV: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the blocks' weights with a 0 before them [R, 1 + blocks], and the largest logits [R, 1], both
    float64. The last block may be shorter.
    """
    top_R1 = logits_RV.amax(dim=1, keepdim=True).float()
    weights_RV = (logits_RV.float() - top_R1).mul_(temperature_R[:, None].reciprocal().float()).exp_()
    whole = weights_RV.shape[1] // BLOCK * BLOCK
    by_lane = weights_RV[:, :whole].unflatten(1, (-1, _IN_FLOAT32, BLOCK // _IN_FLOAT32)).sum(dim=2)
    rest_R1 = weights_RV[:, whole:].sum(dim=1, keepdim=True, dtype=torch.float64)
    sums = by_lane.sum(dim=2, dtype=torch.float64)
    return torch.cat([torch.zeros_like(rest_R1), sums, rest_R1], dim=1), top_R1.double()


def draw_with_margins(
    logits_RV: Tensor, sums: Tensor, top_R1: Tensor, u_R: Tensor, temperature_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row. Return token ids [R] (int64), their log-probabilities [R] and margins [R] (both float64).
    If a margin is positive, the reference would certainly draw the same token. `sums` and `top_R1` are from
    `block_sums`.
    """
    vocabulary = logits_RV.shape[1]
    pair = torch.arange(2, device=u_R.device)
    u_R1, scale_R1 = u_R[:, None], temperature_R[:, None]
    top_R1 = top_R1 / scale_R1

    up_to = sums.cumsum(dim=1)
    block_R1 = _edge_below(up_to, u_R1 * up_to[:, -1:])
    before_R1, end_R1 = up_to.gather(1, block_R1 + pair).split(1, dim=1)
    first_R1 = block_R1 * BLOCK
    ids_RB = first_R1 + torch.arange(BLOCK, device=u_R.device)
    inside_RB = logits_RV.gather(1, ids_RB.clamp(max=vocabulary - 1)).double()
    inside_RB = inside_RB.div_(scale_R1).sub_(top_R1).exp_().masked_fill_(ids_RB >= vocabulary, 0.0)

    edges = torch.cat([before_R1, inside_RB], dim=1).cumsum(dim=1)
    after_R1 = up_to[:, -1:] - end_R1
    totals_R1 = edges[:, -1:] + after_R1
    target_R1 = u_R1 * totals_R1
    place_R1 = _edge_below(edges, target_R1)
    below_R1, above_R1 = edges.gather(1, place_R1 + pair).split(1, dim=1)

    outside_R1 = (before_R1 + after_R1).clamp_(min=0.0)
    bound_R1 = (outside_R1 * (3 * math.log(vocabulary) + 12)).add_(torch.special.entr(outside_R1), alpha=3)
    bound_R1 = bound_R1.mul_(2.0**-24).addcmul_(totals_R1, top_R1.abs().add_(vocabulary), value=2.0**-51)
    margins_R1 = torch.minimum(target_R1 - below_R1, above_R1 - target_R1).sub_(bound_R1)
    tokens_R1 = (first_R1 + place_R1).clamp_(max=vocabulary - 1)
    logits_R1 = logits_RV.gather(1, tokens_R1).double()
    logprobs_R1 = logits_R1.div_(scale_R1).sub_(top_R1).sub_(totals_R1.log())
    return tokens_R1.squeeze(1), logprobs_R1.squeeze(1), margins_R1.squeeze(1).nan_to_num_(nan=-torch.inf)


def _edge_below(edges_RN: Tensor, target_R1: Tensor) -> Tensor:
    """Return the index [R, 1] of the last edge at or below the target, at most N - 2."""
    return torch.searchsorted(edges_RN, target_R1, right=True).sub_(1).clamp_(0, edges_RN.shape[1] - 2)
