"""The interface of objectives: each token's loss, from log-probabilities and advantages alone.

An objective is an expectation over prompts of what its paper maximises; its loss is that with the opposite sign. How
tokens become one number (`echo_hub.learner.weighting`) and what a token counts for beside its own ratio
(`corrections`) is not an objective's business.

Dimensions: N trained tokens of one micro-batch, of whole rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

MAX_LOG_RATIO: Final = 20.0
"""Cap of log r: keeps a token that the learner finds far likelier than its sampler did from overflowing float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What an objective sees of N tokens. Only `learner_logprobs_N` has a graph. All in float32 nats."""

    learner_logprobs_N: Tensor
    old_logprobs_N: Tensor
    """What the ratio is taken against: the behaviour or the proximal policy's, as `objective.old_policy` says."""
    proximal_logprobs_N: Tensor
    """The learner's own at the start of the step."""
    behavior_logprobs_N: Tensor
    advantages_N: Tensor
    rollouts_N: Tensor
    """0 .. num_rollouts - 1, ascending: the tokens of a rollout are side by side."""
    num_rollouts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """`losses_N` before weighting; `clipped_N` (bool): the objective takes the token's gradient away or bounds it."""

    losses_N: Tensor
    clipped_N: Tensor


class Objective(Protocol):
    """One per module, by name in `registry`."""

    def losses(self, tokens: Tokens) -> TokenLosses:
        """Each token's loss; minimising their weighted sum trains the policy."""


def ratio(numerator_logprobs_N: Tensor, denominator_logprobs_N: Tensor) -> Tensor:
    """exp of the difference, its logarithm capped at MAX_LOG_RATIO."""
    return (numerator_logprobs_N - denominator_logprobs_N).clamp(max=MAX_LOG_RATIO).exp()


def rollout_means(values_N: Tensor, tokens: Tokens) -> Tensor:
    """At each token, the mean over its rollout's tokens [N]."""
    return _of_rollouts(Tensor.mean, values_N, tokens)


def rollout_sums(values_N: Tensor, tokens: Tokens) -> Tensor:
    """At each token, the sum over its rollout's tokens [N]."""
    return _of_rollouts(Tensor.sum, values_N, tokens)


def _of_rollouts(reduce: Callable[[Tensor], Tensor], values_N: Tensor, tokens: Tokens) -> Tensor:
    lengths = torch.bincount(tokens.rollouts_N, minlength=tokens.num_rollouts).tolist()
    # Rollout by rollout: adding up by index has no fixed order on CUDA, and what is clipped hangs on rounding.
    return torch.cat([reduce(part).expand_as(part) for part in values_N.split(lengths)])


def truncated_losses(tokens: Tokens, denominator_logprobs_N: Tensor, *, cap: float) -> TokenLosses:
    """-min(r, cap) A log π_θ, without a gradient through r = π_θ / denominator: of AIPO and CISPO."""
    ratio_N = ratio(tokens.learner_logprobs_N.detach(), denominator_logprobs_N)
    losses_N = -ratio_N.clamp(max=cap) * tokens.advantages_N * tokens.learner_logprobs_N
    return TokenLosses(losses_N=losses_N, clipped_N=ratio_N > cap)


def clipped_losses(ratio_N: Tensor, advantages_N: Tensor, *, low: float, high: float) -> TokenLosses:
    """-min(r A, clip(r, 1 - low, 1 + high) A). Source: PPO (arXiv 1707.06347, eq. 7)."""
    bounded_N = ratio_N.clamp(1 - low, 1 + high)
    return TokenLosses(
        losses_N=-torch.minimum(ratio_N * advantages_N, bounded_N * advantages_N),
        clipped_N=((ratio_N > 1 + high) & (advantages_N > 0)) | ((ratio_N < 1 - low) & (advantages_N < 0)),
    )


def k3(log_ratio_N: Tensor, *, bound: float = MAX_LOG_RATIO) -> Tensor:
    """Each token's estimate [N] of KL(q ‖ p) in nats from d = log(p / q): exp(d) - 1 - d, never negative.

    Beyond `bound` it goes on as a straight line: one token's value and gradient stay finite, and the gradient does not
    vanish. Below it the estimate is unbiased for tokens drawn from q. From d, not from the ratio: the logarithm of a
    ratio that has underflowed is infinite. Source: http://joschu.net/blog/kl-approx.html.
    """
    near_N = log_ratio_N.clamp(max=bound)
    line_N = math.expm1(bound) * (log_ratio_N - bound) + (math.expm1(bound) - bound)
    return torch.where(log_ratio_N > bound, line_N, torch.expm1(near_N) - near_N)
