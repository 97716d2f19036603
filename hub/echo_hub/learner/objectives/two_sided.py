"""Two-sided clipping: GRPO with a bound for tokens of negative advantage too.

    l_t = -min(min(r_t, δ) A, clip(r_t, 1 - ε_low, 1 + ε_high) A), δ > 1 + ε_high

l_t, r_t and A are the loss, the probability ratio and the advantage of token t; δ is the additional bound. Where A < 0,
GRPO's loss grows with r without bound: one token that the sampler found nearly impossible can ruin a step.

Published: δ = 4, ε = 0.2, the mean over tokens, A = (R - mean) / std. Its KL term, with weight 0.001 there, is
`objective.kl_coefficient`.

Source: INTELLECT-2 (arXiv 2505.07291).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo_hub.learner.objectives.base import ObjectiveTokens, TokenLosses, clipped_losses, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoSided:
    clip_low: float
    clip_high: float
    cap: float

    def losses(self, tokens: ObjectiveTokens) -> TokenLosses:
        ratio_N = ratio(tokens.learner_logprobs_N, tokens.old_logprobs_N)
        # Use min(r, δ) in both terms. The clipped term stays the same, because δ exceeds 1 + ε_high.
        result = clipped_losses(
            ratio_N.clamp(max=self.cap), tokens.advantages_N, low=self.clip_low, high=self.clip_high
        )
        beyond_N = (ratio_N > self.cap) & (tokens.advantages_N < 0)
        return TokenLosses(losses_N=result.losses_N, clipped_N=result.clipped_N | beyond_N)
