"""VESPO: one soft weight per rollout, from the ratio of the whole rollout.

    W   = Π_t r_t, the ratio of all T tokens that the policy drew
    φ   = W^k exp(λ (1 - W)), with one k and λ where A > 0 and another where A <= 0
    l_t = -sg(φ) A log π_θ(o_t), sg = no gradient

l_t, o_t and A are the loss, the id and the advantage of token t; r_t is its probability ratio, π_θ the policy in
training. φ is 1 at W = 1 and falls to 0 on both sides of its peak at W = k / λ. The peak is (k / λ)^k exp(λ - k): 1.2
with the published numbers, so no reported logprob, however false, lets one rollout dominate a step. Nothing is
normalised by length: the W of a long rollout is soon far from 1, and φ is near 0.

Published: k = 2, λ = 3 where A > 0, k = 3, λ = 2 else, the mean over tokens, A = (R - mean) / std. Nothing is ever
clipped. As in the authors' code, log W is limited to -20 .. 20.

Source: Variational Sequence-level Soft Policy Optimization (arXiv 2602.10693).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from echo_hub.learner.objectives.base import MAX_LOG_RATIO, ObjectiveTokens, TokenLosses, rollout_sums

SHAPE_POSITIVE: Final = 2.0
RATE_POSITIVE: Final = 3.0
SHAPE_NEGATIVE: Final = 3.0
RATE_NEGATIVE: Final = 2.0
"""The paper's values of k (shape) and λ (rate), for positive and negative advantages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vespo:
    def losses(self, tokens: ObjectiveTokens) -> TokenLosses:
        log_ratio_N = tokens.learner_logprobs_N.detach() - tokens.old_logprobs_N
        bounded_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_w_N = rollout_sums(bounded_N, tokens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        is_positive_N = tokens.advantages_N > 0
        shape_N = torch.full_like(log_w_N, SHAPE_NEGATIVE).masked_fill(is_positive_N, SHAPE_POSITIVE)
        rate_N = torch.full_like(log_w_N, RATE_NEGATIVE).masked_fill(is_positive_N, RATE_POSITIVE)
        weight_N = (shape_N * log_w_N - rate_N * log_w_N.expm1()).exp()
        return TokenLosses(
            losses_N=-weight_N * tokens.advantages_N * tokens.learner_logprobs_N,
            clipped_N=torch.zeros_like(is_positive_N),
        )
