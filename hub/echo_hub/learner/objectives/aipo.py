"""AIPO: policy gradient with the truncated importance ratio to the engine that sampled.

    l_t = -sg(min(π_θ(o_t) / μ(o_t), ρ)) A log π_θ(o_t), sg = no gradient

l_t, o_t and A are the loss, the id and the advantage of token t; π_θ is the policy in training, ρ the cap of the ratio.
μ is the behaviour policy: the log-probabilities that the generator itself reported. CISPO may compare with the
learner's own log-probabilities instead; AIPO never does.

Published: ρ in 2..10 (5 here), A = R - mean, the mean over tokens.

Source: LlamaRL (arXiv 2505.24034).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo_hub.learner.objectives.base import ObjectiveTokens, TokenLosses, truncated_losses


@dataclass(frozen=True, slots=True, kw_only=True)
class Aipo:
    cap: float

    def losses(self, tokens: ObjectiveTokens) -> TokenLosses:
        return truncated_losses(tokens, tokens.behavior_logprobs_N, cap=self.cap)
