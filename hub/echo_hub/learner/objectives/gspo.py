"""GSPO: one ratio a rollout, the geometric mean of its tokens'.

    s   = (π_θ(o) / π_old(o))^(1/T) = exp(mean_t log r_t)
    s_t = sg(s) π_θ(o_t) / sg(π_θ(o_t)), sg = no gradient
    l_t = -min(s_t A, clip(s_t, 1 - ε_low, 1 + ε_high) A), of the same value for all T tokens of the rollout

This is the paper's GSPO-token, whose advantage may differ from token to token (`training.credit = "turn"`). With the
mean over rollouts of their token means and one advantage a rollout, it has the value and the gradient of the paper's
one term a rollout; and what a correction makes of a token's loss acts on that token's own gradient, where a shared s
would spread it over all T. T counts the tokens that the policy drew, in all turns.

Published: ε_low = 3e-4, ε_high = 4e-4, A = (R - mean) / std. The ratio moves so little because it is a mean: against
the behaviour policy of an old version, or of an engine with other numerics, most rollouts are clipped. Against the
proximal policy none are in a step's first update, but then nothing corrects for age and engine unless
`objective.correction` does.

Source: GSPO (arXiv 2507.18071, eq. 5-7; GSPO-token in section 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo_hub.learner.objectives.base import TokenLosses, Tokens, clipped_losses, ratio, rollout_means


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo:
    clip_low: float
    clip_high: float

    def losses(self, tokens: Tokens) -> TokenLosses:
        learner_N = tokens.learner_logprobs_N
        means_N = rollout_means(learner_N.detach() - tokens.old_logprobs_N, tokens)
        ratio_N = ratio(learner_N - learner_N.detach(), -means_N)
        return clipped_losses(ratio_N, tokens.advantages_N, low=self.clip_low, high=self.clip_high)
