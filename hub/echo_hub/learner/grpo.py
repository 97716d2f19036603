"""The objective: GRPO, with the loss averaged over tokens and the advantage not divided by the reward's deviation.

    A_i   = R_i - mean(R of the group)
    r_it  = π_θ(o_it | q, o_i<t) / μ(o_it | q, o_i<t)
    L     = -(1 / Σ_i |o_i|) Σ_i Σ_t min(r_it A_i, clip(r_it, 1 - ε, 1 + ε) A_i)

Sources: group-relative advantage and clipped objective, DeepSeekMath (arXiv 2402.03300, eq. 3); no division by the
standard deviation, Dr. GRPO (arXiv 2503.20783, §3.1); sum over all tokens of the batch over their number, DAPO
(arXiv 2503.14476, eq. 8). Departures: μ is the policy that sampled, by its own engine's log-probabilities (so r also
corrects for staleness and for the engine's numerics); there is no KL term to a reference policy; log r is capped.

Dimensions: G rollouts of one group, N completion tokens.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_LOG_RATIO: Final = 20.0
"""Cap of log r: keeps a token that the learner finds far likelier than its sampler did from overflowing float32."""


def group_advantages(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """A_i = R_i - mean(R); exactly zero when all rewards are equal."""
    if rewards_G.min() == rewards_G.max():
        return np.zeros_like(rewards_G)
    advantages: NDArray[np.float64] = rewards_G - rewards_G.mean()
    return advantages


def log_importance_ratio(learner_logprobs_N: Tensor, behavior_logprobs_N: Tensor) -> Tensor:
    """log r [N], capped at MAX_LOG_RATIO."""
    return (learner_logprobs_N - behavior_logprobs_N).clamp(max=MAX_LOG_RATIO)


def clipped_losses(log_ratio_N: Tensor, advantages_N: Tensor, *, clip_epsilon: float) -> Tensor:
    """-min(r A, clip(r, 1 - ε, 1 + ε) A) of each token [N]; the caller sums and divides by the step's tokens."""
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - clip_epsilon, 1 + clip_epsilon)
    return -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)


def mismatch_kl(log_ratio_N: Tensor) -> Tensor:
    """Each token's estimate [N] of KL(μ ‖ π_θ) in nats: r - 1 - log r, unbiased and never negative.

    Source: http://joschu.net/blog/kl-approx.html (k3).
    """
    return torch.expm1(log_ratio_N) - log_ratio_N


def is_clipped(log_ratio_N: Tensor, advantages_N: Tensor, *, clip_epsilon: float) -> Tensor:
    """Whether the clip takes the token's gradient away [N]."""
    ratio_N = log_ratio_N.exp()
    too_high = (ratio_N > 1 + clip_epsilon) & (advantages_N > 0)
    return too_high | ((ratio_N < 1 - clip_epsilon) & (advantages_N < 0))
