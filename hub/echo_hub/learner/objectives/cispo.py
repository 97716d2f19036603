"""CISPO: the importance ratio is a truncated constant, so that every token keeps a gradient.

    l_t = -sg(min(r_t, cap)) A log π_θ(o_t), sg = no gradient

l_t, o_t and A are the loss, the id and the advantage of token t; r_t is the ratio of π_θ, the policy in training, to
the policy of `objective.old_policy`. Published: only an upper bound; the mean over each group's tokens; A = (R - mean)
/ std. The paper gives no number; cap = 5 is ScaleRL's (arXiv 2510.13786).

Source: MiniMax-M1 (arXiv 2506.13585, section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo_hub.learner.objectives.base import ObjectiveTokens, TokenLosses, truncated_losses


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo:
    cap: float

    def losses(self, tokens: ObjectiveTokens) -> TokenLosses:
        return truncated_losses(tokens, tokens.old_logprobs_N, cap=self.cap)
