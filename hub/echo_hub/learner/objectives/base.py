"""The interface of objectives: each token's loss, from log-probabilities and advantages alone.

An objective is an expectation over prompts that its paper maximises; its loss has the opposite sign. Aggregation of
tokens (`echo_hub.learner.weighting`) and extra token weights (`corrections`) are not part of an objective.

Symbols in the formulas of this package, for token t of a rollout:

    l_t, o_t, A    loss, token id and advantage; R is the rollout's reward
    π_θ, π_prox    policy in training, now and at the start of the step
    μ              behaviour policy, which drew the token
    π_old          μ or π_prox, by `objective.old_policy`; r_t = π_θ(o_t) / π_old(o_t)
    ε_low, ε_high  clip bounds; sg means that no gradient flows

Dimensions: N trained tokens of one micro-batch, which holds whole rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

MAX_LOG_RATIO: Final = 20.0
"""Largest log-ratio. If the learner finds a token far likelier than its sampler did, the cap prevents an overflow in
float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveTokens:
    """An objective's inputs for N tokens. Only `learner_logprobs_N` has an autograd graph.
    Logprobs are float32 nats.
    """

    learner_logprobs_N: Tensor
    old_logprobs_N: Tensor
    """Denominator of the ratio: the behaviour or the proximal policy, by `objective.old_policy`."""
    proximal_logprobs_N: Tensor
    """The learner's logprobs at the start of the step, before its first update."""
    behavior_logprobs_N: Tensor
    advantages_N: Tensor
    rollouts_N: Tensor
    """Index of each token's rollout, ascending: a rollout's tokens are adjacent."""
    lengths: Sequence[int]
    """Number of tokens of each rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Losses of N tokens. `losses_N` are not weighted yet. `clipped_N` (bool) is true where the objective removes or
    bounds the token's gradient.
    """

    losses_N: Tensor
    clipped_N: Tensor


class Objective(Protocol):
    """An objective. Each module of this package defines one; `registry` lists them by name."""

    def losses(self, tokens: ObjectiveTokens) -> TokenLosses:
        """Return each token's loss. Minimising their weighted sum trains the policy."""


def ratio(numerator_logprobs_N: Tensor, denominator_logprobs_N: Tensor) -> Tensor:
    """Return the ratio of two probabilities from their logarithms, with the log-ratio capped at MAX_LOG_RATIO."""
    return (numerator_logprobs_N - denominator_logprobs_N).clamp(max=MAX_LOG_RATIO).exp()


def rollout_means(values_N: Tensor, tokens: ObjectiveTokens) -> Tensor:
    """Return, for each token, the mean of the values over all tokens of its rollout [N]."""
    return torch.cat([part.mean().expand_as(part) for part in _by_rollout(values_N, tokens)])


def rollout_sums(values_N: Tensor, tokens: ObjectiveTokens) -> Tensor:
    """Return, for each token, the sum of the values over all tokens of its rollout [N]."""
    return torch.cat([part.sum().expand_as(part) for part in _by_rollout(values_N, tokens)])


def _by_rollout(values_N: Tensor, tokens: ObjectiveTokens) -> Sequence[Tensor]:
    """Return each rollout's values. Do not use index_add over all rollouts: on CUDA it adds in no fixed order, and
    rounding can decide which tokens are clipped.
    """
    parts: Sequence[Tensor] = values_N.split(list(tokens.lengths))
    return parts


def truncated_losses(tokens: ObjectiveTokens, denominator_logprobs_N: Tensor, *, cap: float) -> TokenLosses:
    """Return -min(r, cap) A log π_θ for AIPO and CISPO, with no gradient through r = π_θ / denominator."""
    ratio_N = ratio(tokens.learner_logprobs_N.detach(), denominator_logprobs_N)
    losses_N = -ratio_N.clamp(max=cap) * tokens.advantages_N * tokens.learner_logprobs_N
    return TokenLosses(losses_N=losses_N, clipped_N=ratio_N > cap)


def clipped_losses(ratio_N: Tensor, advantages_N: Tensor, *, low: float, high: float) -> TokenLosses:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A). Source: PPO (arXiv 1707.06347, eq. 7)."""
    bounded_N = ratio_N.clamp(1 - low, 1 + high)
    return TokenLosses(
        losses_N=-torch.minimum(ratio_N * advantages_N, bounded_N * advantages_N),
        clipped_N=((ratio_N > 1 + high) & (advantages_N > 0)) | ((ratio_N < 1 - low) & (advantages_N < 0)),
    )


def k3(log_ratio_N: Tensor, *, bound: float = MAX_LOG_RATIO) -> Tensor:
    """Return each token's estimate [N] of KL(q ‖ p) in nats from d = log(p / q): exp(d) - 1 - d, never negative.

    Above `bound` it continues as a straight line, so one token's value and gradient stay finite and the gradient does
    not vanish. Below `bound` the estimate is unbiased for tokens drawn from q. It uses d instead of the ratio, because
    the logarithm of an underflowed ratio is infinite. Source: http://joschu.net/blog/kl-approx.html.
    """
    near_N = log_ratio_N.clamp(max=bound)
    line_N = math.expm1(bound) * (log_ratio_N - bound) + (math.expm1(bound) - bound)
    return torch.where(log_ratio_N > bound, line_N, torch.expm1(near_N) - near_N)
