"""SAPO: a soft gate instead of GRPO's clip.

    l_t = -f(r_t) A,   f(r) = (4 / τ) σ(τ (r - 1)),   τ = τ_pos where A > 0, else τ_neg

l_t, r_t and A are the loss, the probability ratio and the advantage of token t; σ is the logistic function, τ the
gate's steepness. The gradient is that of -w(r) r A log π_θ with w = 4 p (1 - p), p = σ(τ (r - 1)). At r = 1, w has its
peak 1, which is the unclipped gradient; w falls on both sides. For τ >= 1, w(r) r is below 1.6, so no reported logprob,
however false, lets one token dominate a step.

Published: τ_pos = 1, τ_neg = 1.05 (a push away from a token spreads over all other tokens, so it is damped more), the
mean over rollouts of their token means, A = (R - mean) / std. Nothing is ever clipped.

Source: Soft Adaptive Policy Optimization (arXiv 2511.20347).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from echo_hub.learner.objectives.base import ObjectiveTokens, TokenLosses, ratio

TEMPERATURE_POSITIVE: Final = 1.0
TEMPERATURE_NEGATIVE: Final = 1.05
"""The paper's values of τ (steepness of the gate), for positive and negative advantages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sapo:
    def losses(self, tokens: ObjectiveTokens) -> TokenLosses:
        ratio_N = ratio(tokens.learner_logprobs_N, tokens.old_logprobs_N)
        negative_N = torch.full_like(ratio_N, TEMPERATURE_NEGATIVE)
        temperature_N = negative_N.masked_fill(tokens.advantages_N > 0, TEMPERATURE_POSITIVE)
        gated_N = 4 / temperature_N * torch.sigmoid(temperature_N * (ratio_N - 1))
        return TokenLosses(
            losses_N=-gated_N * tokens.advantages_N, clipped_N=torch.zeros_like(ratio_N, dtype=torch.bool)
        )
