"""One step: a batch of groups turns policy version k - 1 into k."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from echo_hub.config.sections import ObjectiveConfig, TrainingConfig
from echo_hub.learner.batch import MicroBatch
from echo_hub.learner.objectives.loss import STATISTICS, Statistics, StepLoss
from echo_hub.learner.policy import Policy
from echo_hub.learner.ranks import Ranks
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_hub.learner.weighting import WeightedStep, weigh
from echo_shared import step_figures as figures

log = logging.getLogger(__name__)


def make_optimizer(policy: Policy, settings: TrainingConfig) -> torch.optim.AdamW:
    """Adam without weight decay, on the adapter alone."""
    return torch.optim.AdamW(policy.parameters.values(), lr=settings.learning_rate, weight_decay=0.0, fused=True)


def train_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[TrainingGroup],
    settings: LearnerSettings,
    *,
    learner_version: int = 0,
) -> dict[str, float]:
    """Trains version `learner_version` on `groups`, the same at every rank, and returns the step's metrics, which are
    the same as well.

    They are mean_reward (as the task gave it) and, by their keys, the figures of `echo_shared.step_figures` that a
    learner knows. One that is not finite is left out, with a warning: of a step whose gradient is not, the loss or the
    gradient's norm. Those over the computed tokens, with the weights that they were computed with, are there if there
    are any; those of a correction or a KL term, if the objective has one.
    """
    started = time.perf_counter()
    loss = StepLoss(settings.objective)
    step = weigh(groups, settings)
    shares = _shares(policy.ranks, step, settings)
    # Of the first share, the pass that is differentiated is itself the one at the start of the step.
    proximal = [
        [_proximal_logprobs(policy, batch) if number and loss.needs_proximal else None for batch in share]
        for number, share in enumerate(shares)
    ]
    statistics: list[Tensor] = []
    norms: list[float] = []
    for share, known in zip(shares, proximal, strict=True):
        optimizer.zero_grad(set_to_none=True)
        for batch, proximal_N in zip(share, known, strict=True):
            statistics.append(accumulate_gradient(policy, batch, loss, proximal_N=proximal_N, scale=len(shares)))
        norms.append(_update(policy, optimizer, settings.training))
    metrics = {
        **_step_metrics(groups, step, learner_version),
        **_token_metrics(_total(policy.ranks, statistics), settings.objective),
        figures.GRAD_NORM.key: float(np.mean(norms)) if norms else 0.0,
        figures.UPDATED.key: float(sum(map(_is_usable, norms))),
        figures.TRAIN_S.key: time.perf_counter() - started,
    }
    return _finite(metrics)


def accumulate_gradient(
    policy: Policy, batch: MicroBatch, loss: StepLoss, *, proximal_N: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Adds `scale` times the batch's part of the loss's gradient; its STATISTICS, on the policy's device.

    `proximal_N`: the learner's log-probabilities at the start of the step; None = it is there still.
    """
    batch = batch.to(policy.device)
    reference_N = policy.reference_logprobs(batch) if loss.needs_reference else None
    value, statistics = loss(
        batch, policy.logprobs(batch), proximal_logprobs_N=proximal_N, reference_logprobs_N=reference_N
    )
    torch.autograd.backward(value * scale)
    return statistics


def _total(ranks: Ranks, statistics: Sequence[Tensor]) -> Tensor:
    """STATISTICS of all micro-batches of all ranks as one: float64 on the CPU; zeros of none."""
    if not statistics:
        return torch.zeros(len(STATISTICS), dtype=torch.float64)
    table = ranks.collect(torch.stack(list(statistics))).cpu().double()
    return torch.cat((table[:, :-1].sum(dim=0), table[:, -1:].amax(dim=0)))


def _shares(ranks: Ranks, step: WeightedStep, settings: LearnerSettings) -> list[list[MicroBatch]]:
    """This process's micro-batches of each update, whose groups are dealt out in turn; no share is empty."""
    updates = min(len(step.groups), settings.training.updates_per_step)
    return [
        ranks.micro_batches(step.groups[first::updates], micro_batch_tokens=settings.learner.micro_batch_tokens)
        for first in range(updates)
    ]


def _proximal_logprobs(policy: Policy, batch: MicroBatch) -> Tensor:
    with torch.no_grad():
        return policy.logprobs(batch.to(policy.device))


def _update(policy: Policy, optimizer: torch.optim.Optimizer, settings: TrainingConfig) -> float:
    """One optimizer update with all ranks' gradients, unless there is none or one that is not finite; its norm before
    clipping."""
    policy.ranks.add_up(parameter.grad for parameter in policy.parameters.values() if parameter.grad is not None)
    norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters.values(), settings.max_grad_norm))
    if _is_usable(norm):
        optimizer.step()
    return norm


def _is_usable(norm: float) -> bool:
    """Adam's momentum moves the weights even where the gradient is zero, as when every rollout is vetoed."""
    return 0 < norm < float("inf")


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without those that are not numbers: JSON and PostgreSQL have no word for them."""
    lost = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if lost:
        log.warning("metrics that are not finite are left out: %s", lost)
    return {name: value for name, value in metrics.items() if name not in lost}


def _step_metrics(groups: Sequence[TrainingGroup], step: WeightedStep, learner_version: int) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = [int(rollout.loss_mask.sum()) for rollout in rollouts]
    return {
        "mean_reward": float(np.mean([rollout.reward for rollout in rollouts])),
        figures.GROUPS_WITHOUT_ADVANTAGE.key: float(step.groups_without_advantage),
        figures.SHARE_WITHOUT_ADVANTAGE.key: step.groups_without_advantage / len(groups),
        figures.ROLLOUTS_MASKED.key: float(step.rollouts_masked),
        figures.ROLLOUTS_UNSELECTED.key: float(step.rollouts_unselected),
        figures.SHARE_TRUNCATED.key: float(np.mean([rollout.truncated for rollout in rollouts])),
        figures.SHARE_MIXED.key: float(np.mean([rollout.num_versions > 1 for rollout in rollouts])),
        figures.TOKEN_STALENESS.key: float(
            np.average([learner_version - rollout.mean_version for rollout in rollouts], weights=tokens)
        ),
        figures.COMPLETION_TOKENS.key: float(sum(tokens)),
    }


def _token_metrics(statistics: Tensor, objective: ObjectiveConfig) -> dict[str, float]:
    sums = Statistics(*statistics.tolist())
    metrics = {
        figures.LOSS.key: sums.loss,
        figures.COMPUTED_TOKENS.key: sums.tokens,
        figures.ROLLOUTS_VETOED.key: sums.vetoed_rollouts,
    }
    if not sums.tokens:
        return metrics
    metrics |= {
        figures.RATIO_MEAN.key: sums.ratio / sums.tokens,
        figures.RATIO_MAX.key: sums.ratio_max,
        figures.CLIP_FRACTION.key: sums.clipped / sums.tokens,
        figures.MISMATCH_KL.key: sums.mismatch_kl / sums.tokens,
    }
    if objective.correction != "none":
        metrics |= {
            figures.CORRECTION_WEIGHT.key: sums.correction_weight / sums.tokens,
            figures.CORRECTION_SHARE.key: sums.corrected / sums.tokens,
        }
    if objective.kl_coefficient:
        metrics[figures.BASE_KL.key] = sums.base_kl / sums.tokens
    return metrics
