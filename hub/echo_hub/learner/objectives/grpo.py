"""GRPO: the clipped importance-weighted advantage.

    r_t = π_θ(o_t) / π_old(o_t)
    l_t = -min(r_t A, clip(r_t, 1 - ε_low, 1 + ε_high) A)

l_t, o_t and A are the loss, the id and the advantage of token t; R is the rollout's reward. π_θ is the policy in
training, π_old the policy of `objective.old_policy`. Published: ε = 0.2 on both sides, the mean over rollouts of their
token means, A = (R - mean) / std. Its KL term, with weight 0.04 there, is `objective.kl_coefficient`.

Source: DeepSeekMath (arXiv 2402.03300, eq. 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo_hub.learner.objectives.base import ObjectiveTokens, TokenLosses, clipped_losses, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo:
    clip_low: float
    clip_high: float

    def losses(self, tokens: ObjectiveTokens) -> TokenLosses:
        ratio_N = ratio(tokens.learner_logprobs_N, tokens.old_logprobs_N)
        return clipped_losses(ratio_N, tokens.advantages_N, low=self.clip_low, high=self.clip_high)
