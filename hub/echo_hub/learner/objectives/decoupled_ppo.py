"""Decoupled PPO: the trust region is around the learner's own recent policy; a weight corrects for the policy that
sampled.

    u_t = π_θ(o_t) / π_prox(o_t)
    w_t = π_prox(o_t) / μ(o_t), 0 where it exceeds the cap
    l_t = -w_t min(u_t A, clip(u_t, 1 - ε_low, 1 + ε_high) A)

l_t, o_t and A are the loss, the id and the advantage of token t; π_θ is the policy in training, μ the policy that drew
the token. π_prox is the learner at the start of the step; with one update per step, u = 1. A token beyond the cap is
left out, but still counts in the aggregation's denominator, as in AReaL's code.

Published: ε = 0.2, cap 5, the mean over tokens, advantages normalised over the batch.

Source: AReaL (arXiv 2505.24298), after Hilton et al. (arXiv 2110.00641).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo_hub.learner.objectives.base import ObjectiveTokens, TokenLosses, clipped_losses, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPpo:
    clip_low: float
    clip_high: float
    cap: float

    def losses(self, tokens: ObjectiveTokens) -> TokenLosses:
        weight_N = ratio(tokens.proximal_logprobs_N, tokens.behavior_logprobs_N)
        beyond_N = weight_N > self.cap
        ratio_N = ratio(tokens.learner_logprobs_N, tokens.proximal_logprobs_N)
        result = clipped_losses(ratio_N, tokens.advantages_N, low=self.clip_low, high=self.clip_high)
        return TokenLosses(
            losses_N=weight_N.masked_fill(beyond_N, 0) * result.losses_N, clipped_N=result.clipped_N | beyond_N
        )
