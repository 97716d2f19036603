"""Corrections of token losses, for tokens that another policy drew than the one in the denominator of the objective's
ratio.

    k_t = π_prox(o_t) / μ(o_t), π_prox the learner at the start of the step, μ the behaviour policy
    none        1: no correction for the engine's mismatch and the rollout's age
    tis         min(k_t, C), C = 2: truncated importance sampling
    masked_is   k_t, 0 outside a band
    veto        0 for the whole rollout if k_t < threshold for any of its tokens; with every objective
    mask        l_t = 0 where A < 0 and mean_t log(μ(o_t) / π_θ(o_t)) > threshold, the mean over the rollout; with every
                objective. Rollouts that the policy has already moved away from are not pushed further away

Tokens and rollouts of weight 0 still count in the aggregation's denominator, as published: a step with many of them is
a smaller step.

Sources: tis: https://fengyao.notion.site/off-policy-rl. masked_is: IcePop, in Every Step Evolves (arXiv 2510.18855).
mask: off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556, section 3.1); as there, a KL term stays. veto:
https://yingru.notion.site/When-Speed-Kills-Stability-271211a558b7808d8b12d403fd15edda.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.learner.objectives.base import ObjectiveTokens, ratio, rollout_means


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Corrections of the token losses of a micro-batch. `weights_N` are factors of the losses, without an autograd
    graph. `bounded_N` (bool) marks truncated or masked tokens, `vetoed_R` (bool) rollouts dropped by
    objective.sequence_veto, `masked_N` (bool) tokens removed by objective.sequence_mask.
    """

    weights_N: Tensor
    bounded_N: Tensor
    vetoed_R: Tensor
    masked_N: Tensor


def correct(tokens: ObjectiveTokens, settings: ObjectiveConfig) -> Correction:
    """Return the weights of `settings.correction`. The caller zeroes vetoed rollouts and masked tokens."""
    ratio_N = ratio(tokens.proximal_logprobs_N, tokens.behavior_logprobs_N)
    low, high = settings.correction_low, settings.correction_high
    match settings.correction:
        case "none":
            weights_N, bounded_N = torch.ones_like(ratio_N), torch.zeros_like(ratio_N, dtype=torch.bool)
        case "tis":
            weights_N, bounded_N = ratio_N.clamp(max=high), ratio_N > high
        case "masked_is":
            bounded_N = (ratio_N < low) | (ratio_N > high)
            weights_N = ratio_N.masked_fill(bounded_N, 0)
        case _:
            assert_never(settings.correction)
    return Correction(
        weights_N=weights_N,
        bounded_N=bounded_N,
        vetoed_R=in_rollouts(ratio_N < settings.sequence_veto, tokens),
        masked_N=_masked(tokens, settings.sequence_mask),
    )


def in_rollouts(found_N: Tensor, tokens: ObjectiveTokens) -> Tensor:
    """Return True for each rollout [R] with a token for which `found_N` is True."""
    counts_R = torch.zeros(len(tokens.lengths), dtype=torch.int32, device=found_N.device)
    return counts_R.index_add(0, tokens.rollouts_N, found_N.to(torch.int32)) > 0


def _masked(tokens: ObjectiveTokens, threshold: float) -> Tensor:
    """Return True for each token [N] that objective.sequence_mask removes. With `threshold` 0 it removes none."""
    if not threshold:
        return torch.zeros_like(tokens.rollouts_N, dtype=torch.bool)
    means_N = rollout_means(tokens.behavior_logprobs_N - tokens.learner_logprobs_N.detach(), tokens)
    return (means_N > threshold) & (tokens.advantages_N < 0)
