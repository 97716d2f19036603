"""GSPO: one ratio per rollout, the geometric mean of its tokens' ratios.

    s   = (π_θ(o) / π_old(o))^(1/T) = exp(mean_t log r_t)
    s_t = sg(s) π_θ(o_t) / sg(π_θ(o_t)), sg = no gradient
    l_t = -min(s_t A, clip(s_t, 1 - ε_low, 1 + ε_high) A), the same value for all T tokens of the rollout

This is the paper's GSPO-token, whose advantage may differ between tokens (`training.credit = "turn"`). With one
advantage per rollout, and the mean over rollouts of their token means, its value and gradient equal those of the
paper's one term per rollout. A correction of a token's loss then acts on that token's own gradient; a shared s would
spread it over all T. T counts the tokens that the policy drew, in all turns.

Published: ε_low = 3e-4, ε_high = 4e-4, A = (R - mean) / std. The bounds are small because the ratio is a mean. If the
denominator is the behaviour policy of an old version, or of an engine with other numerics, most rollouts are clipped.
If it is the proximal policy, none are clipped in a step's first update, but then only `objective.correction` corrects
for age and engine.

Source: GSPO (arXiv 2507.18071, eq. 5-7; GSPO-token in section 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo_hub.learner.objectives.base import ObjectiveTokens, TokenLosses, clipped_losses, ratio, rollout_means


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo:
    clip_low: float
    clip_high: float

    def losses(self, tokens: ObjectiveTokens) -> TokenLosses:
        learner_N = tokens.learner_logprobs_N
        means_N = rollout_means(learner_N.detach() - tokens.old_logprobs_N, tokens)
        ratio_N = ratio(learner_N - learner_N.detach(), -means_N)
        return clipped_losses(ratio_N, tokens.advantages_N, low=self.clip_low, high=self.clip_high)
