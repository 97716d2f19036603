"""One optimizer step: a batch of groups turns policy version k - 1 into k.

Groups whose rewards are all equal have no gradient. They cost no computation, but their tokens count in the loss's
denominator: the step is the same as if they had been computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from echo_hub.config import TrainingConfig
from echo_hub.learner import grpo
from echo_hub.learner.batch import MicroBatch, build_micro_batches
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import TrainingGroup


def make_optimizer(policy: Policy, settings: TrainingConfig) -> torch.optim.AdamW:
    """Adam without weight decay, on the adapter alone."""
    return torch.optim.AdamW(policy.parameters.values(), lr=settings.learning_rate, weight_decay=0.0, fused=True)


def train_step(
    policy: Policy, optimizer: torch.optim.Optimizer, groups: Sequence[TrainingGroup], settings: TrainingConfig
) -> dict[str, float]:
    """Trains on `groups` and returns the step's metrics.

    Always: mean_reward, share_without_advantage (of the groups), completion_tokens, computed_tokens (those in groups
    with an advantage), loss, grad_norm (before clipping), updated (0 when there was no gradient, or one that is not
    finite: the weights then stay), train_s. Over the computed tokens, if there are any: ratio_mean, ratio_max,
    clip_fraction, mismatch_kl.
    """
    started = time.perf_counter()
    advantages = [grpo.group_advantages(np.array([rollout.reward for rollout in group.rollouts])) for group in groups]
    completion_tokens = sum(len(rollout.completion_ids) for group in groups for rollout in group.rollouts)
    batches = build_micro_batches(
        groups,
        advantages,
        micro_batch_tokens=settings.micro_batch_tokens,
        shared_row_tokens=policy.shared_row_tokens,
    )
    optimizer.zero_grad(set_to_none=True)
    statistics = [
        accumulate_gradient(policy, batch, completion_tokens=completion_tokens, clip_epsilon=settings.clip_epsilon)
        for batch in batches
    ]
    grad_norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters.values(), settings.max_grad_norm))
    updated = bool(batches) and np.isfinite(grad_norm)
    if updated:
        optimizer.step()
    return {
        "mean_reward": float(np.mean([rollout.reward for group in groups for rollout in group.rollouts])),
        "share_without_advantage": sum(not values.any() for values in advantages) / len(groups),
        "completion_tokens": float(completion_tokens),
        **_token_metrics(statistics, completion_tokens),
        "grad_norm": grad_norm,
        "updated": float(updated),
        "train_s": time.perf_counter() - started,
    }


def accumulate_gradient(policy: Policy, batch: MicroBatch, *, completion_tokens: int, clip_epsilon: float) -> Tensor:
    """Adds the batch's part of the loss's gradient; `completion_tokens` are the whole step's.

    Returns float64 [6]: tokens, sum of losses, sum of ratios, clipped tokens, sum of mismatch KL, largest ratio.
    """
    batch = batch.to(policy.device)
    log_ratio_N = grpo.log_importance_ratio(policy.logprobs(batch), batch.behavior_logprobs_N)
    losses_N = grpo.clipped_losses(log_ratio_N, batch.advantages_N, clip_epsilon=clip_epsilon)
    torch.autograd.backward(losses_N.sum() / completion_tokens)
    with torch.no_grad():
        clipped_N = grpo.is_clipped(log_ratio_N, batch.advantages_N, clip_epsilon=clip_epsilon)
        ratio_N = log_ratio_N.exp()
        columns = (torch.ones_like(ratio_N), losses_N, ratio_N, clipped_N, grpo.mismatch_kl(log_ratio_N))
        return torch.stack([*(column.sum().cpu().double() for column in columns), ratio_N.max().cpu().double()])


def _token_metrics(statistics: Sequence[Tensor], completion_tokens: int) -> dict[str, float]:
    if not statistics:
        return {"loss": 0.0, "computed_tokens": 0.0}
    table = torch.stack(list(statistics))
    tokens, losses, ratios, clipped, kl = table[:, :-1].sum(dim=0).tolist()
    return {
        "loss": losses / completion_tokens,
        "computed_tokens": tokens,
        "ratio_mean": ratios / tokens,
        "ratio_max": float(table[:, -1].max()),
        "clip_fraction": clipped / tokens,
        "mismatch_kl": kl / tokens,
    }
