"""One step: a batch of groups turns policy version k - 1 into k.

Between a micro-batch's forward and backward pass, its rollouts are screened for forgeries (`echo_hub.learner.screen`).
Groups left out by the screen get no gradient. Other groups keep their weights, so the step is smaller. A group may be
split over micro-batches, and so over ranks. If the screen leaves out a group after a part of it entered the gradient,
that part is computed again and subtracted before the optimizer runs. This is exact except for rounding. Clearly forged
rollouts are left out at once, so the rounding error has the size of an honest gradient's. Without forged rollouts,
nothing is subtracted.

If a step has several updates, later updates may contain rollouts of the first update's groups. Then all rollouts are
screened before the first update: either all updates use a group, or none.

An update is held back (not applied) if its gradient norm is an outlier of the run's history (`echo_hub.learner.norms`).
Weights and optimizer stay as they are, and the rollouts that dominate the gradient become suspects.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.training_sections import TrainingConfig
from echo_hub.learner import determinism, entropy, routing, screen
from echo_hub.learner.batch import MicroBatch, build_micro_batches, halved
from echo_hub.learner.history import NO_HISTORY, History
from echo_hub.learner.norms import WINDOW, limit
from echo_hub.learner.objectives.loss import STATISTICS, Statistics, StepLoss
from echo_hub.learner.policy import Policy
from echo_hub.learner.ranks import TrainingRanks
from echo_hub.learner.screen import ScreenFindings
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_hub.learner.weighting import WeightedGroup, WeightedStep, weigh
from echo_shared.records import step_figures as figures

log = logging.getLogger(__name__)


def make_optimizer(policy: Policy, settings: TrainingConfig) -> torch.optim.AdamW:
    """Return Adam without weight decay, for the adapter only."""
    return torch.optim.AdamW(policy.parameters.values(), lr=settings.learning_rate, weight_decay=0.0, fused=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    metrics: dict[str, float]
    screen: Mapping[str, Any]
    """Findings of the test for forged rollouts, as `screen.ScreenFindings.frame` returns them. At rank 0 they cover the
    rollouts of all ranks.
    """
    history: History


def train_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[TrainingGroup],
    settings: LearnerSettings,
) -> dict[str, float]:
    """Train a step without history, and return its metrics: see `screened_step`."""
    return screened_step(policy, optimizer, groups, settings).metrics


def screened_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[TrainingGroup],
    settings: LearnerSettings,
    *,
    learner_version: int = 0,
    history: History = NO_HISTORY,
) -> StepOutcome:
    """Train version `learner_version` on `groups`. Groups and metrics are the same at every rank.

    `history` comes from the previous step's outcome. The metrics are mean_reward (before any penalty) and the learner's
    figures of `echo_shared.records.step_figures`, by key. Non-finite values, such as the loss or norm of a broken
    gradient, are omitted with a warning. If no tokens were trained, the metrics over trained tokens are missing.
    Metrics of a correction, a KL term or an entropy bonus exist only if the objective has one.
    """
    started = time.perf_counter()
    history, entropy_coefficient = entropy.adapt(history, settings.objective)
    loss = StepLoss(settings.objective, entropy_coefficient=entropy_coefficient)
    groups = routing.fitting(groups, policy.routers)
    step = weigh(groups, settings, learner_version=learner_version)
    tokens = settings.learner.tokens_at_once
    shares = [policy.ranks.micro_batches(of_update, micro_batch_tokens=tokens) for of_update in step.updates]
    findings = ScreenFindings()
    # If the step has several updates, the log-probabilities at its start need an extra forward pass. If it has one, the
    # update's own forward pass gives them.
    early = loss.needs_proximal or step.divides_groups
    proximal = [
        [_at_start(policy, batch, findings) if number and early else None for batch in share]
        for number, share in enumerate(shares)
    ]
    statistics: list[Tensor] = []
    recent = list(history.norms)
    found: list[float] = []
    updated = held_back = 0
    for of_update, share, known in zip(step.updates, shares, proximal, strict=True):
        optimizer.zero_grad(set_to_none=True)
        statistics += _screened_gradient(policy, share, known, loss, findings, scale=len(shares))
        norm = _norm(policy, settings.training)
        found.append(norm)
        if 0 < norm <= min(limit(recent), sys.float_info.max):
            optimizer.step()
            updated += 1
        elif norm != 0:
            held_back += 1
            findings.suspects |= _dominant(policy, of_update, loss, settings, left_out=findings.left_out)
        if 0 < norm < float("inf"):
            recent.append(norm)
    metrics = {
        **_step_metrics(groups, step, learner_version),
        **_token_metrics(_total(policy.ranks, statistics), settings.objective),
        figures.GRAD_NORM.key: float(np.mean(found)) if found else 0.0,
        figures.UPDATED.key: float(updated),
        figures.HELD_BACK.key: float(held_back),
        figures.GROUPS_LEFT_OUT.key: float(len(findings.left_out)),
        figures.TRAIN_S.key: time.perf_counter() - started,
    }
    findings.add_counts(policy.ranks.gather({"counts": findings.packed_counts()})[1:])
    if settings.objective.trains_entropy:
        metrics[figures.ENTROPY_COEFFICIENT.key] = entropy_coefficient
    turns = [max(1, len(rollout.draws)) for group in groups for rollout in group.rollouts]
    metrics = _finite(metrics)
    measured = metrics.get(figures.ENTROPY.key, history.newest_entropy)
    return StepOutcome(
        metrics=metrics,
        screen=findings.frame(turns),
        history=replace(history, norms=tuple(recent[-WINDOW:]), newest_entropy=measured),
    )


def smaller(
    ranks: TrainingRanks, groups: Sequence[TrainingGroup], settings: LearnerSettings, *, learner_version: int = 0
) -> int | None:
    """Return the `micro_batch_tokens` that halves the step's largest micro-batches; None if each holds a single
    rollout.
    """
    tokens = settings.learner.tokens_at_once
    step = weigh(groups, settings, learner_version=learner_version)
    found = [halved(share, ranks.budget(share, tokens)) for share in step.updates]
    return max((budget for budget in found if budget is not None), default=None)


class GroupChoice(Protocol):
    """Chooses the groups of a micro-batch that get a gradient."""

    def keep(self, batch: MicroBatch, logprobs_N: Tensor, distances_N: Tensor) -> Collection[int] | None:
        """Return the indices of the groups that get a gradient; None means all groups.

        `batch` is in host memory. `logprobs_N` are the learner's log-probabilities. `distances_N` are the distances of
        each token's random number u from the interval of cumulative probability that draws the token.
        """


def accumulate_gradient(
    policy: Policy,
    batch: MicroBatch,
    loss: StepLoss,
    *,
    proximal_N: Tensor | None = None,
    scale: float = 1.0,
    choice: GroupChoice | None = None,
) -> Tensor:
    """Add `scale` times the micro-batch's part of the loss gradient. Return its `Statistics` as a tensor on the
    policy's device.

    `batch` is in host memory. `proximal_N` are the learner's logprobs at the start of the step; None means that the
    learner has not changed since. Without a `choice`, all groups get a gradient.
    """
    on_host, batch = batch, batch.to(policy.device)
    reference_N = policy.reference_logprobs(batch) if loss.needs_reference else None
    logprobs_N, distances_N, entropies_N = policy.screened(batch, entropy_gradient=loss.needs_entropy_gradient)
    kept = None if choice is None else choice.keep(on_host, logprobs_N.detach(), distances_N)
    if kept is not None:
        batch, kept_N = batch.of_groups(kept)
        logprobs_N, entropies_N = logprobs_N[kept_N], entropies_N[kept_N]
        proximal_N = None if proximal_N is None else proximal_N[kept_N]
        reference_N = None if reference_N is None else reference_N[kept_N]
    value, statistics = loss(
        batch,
        logprobs_N,
        proximal_logprobs_N=proximal_N,
        reference_logprobs_N=reference_N,
        entropies_N=entropies_N,
    )
    determinism.backward(value * scale)
    return statistics


def _screened_gradient(
    policy: Policy,
    share: Sequence[MicroBatch],
    proximal: Sequence[Tensor | None],
    loss: StepLoss,
    findings: ScreenFindings,
    *,
    scale: float,
) -> list[Tensor]:
    """Add the gradient of this rank's micro-batches, except for groups in which any rank has detected a forged rollout.
    Return the `Statistics` of each as tensors.

    `proximal` holds the result of `_at_start` for each micro-batch, or None. Micro-batches with a result are already
    screened.
    """
    statistics: list[Tensor] = []
    added: list[set[int]] = []
    for batch, proximal_N in zip(share, proximal, strict=True):
        choice = _NotLeftOut(findings, is_screened=proximal_N is not None)
        part = accumulate_gradient(policy, batch, loss, proximal_N=proximal_N, scale=scale, choice=choice)
        findings.count_screened()  # A GPU computes the backward pass meanwhile.
        statistics.append(part)
        added.append(set(batch.groups) - findings.left_out)
    for said in policy.ranks.exchange({"left_out": list(findings.left_out), "suspects": list(findings.suspects)}):
        findings.left_out.update(said["left_out"])
        findings.suspects.update(said["suspects"])
    torn = [(number, groups & findings.left_out) for number, groups in enumerate(added)]
    torn = [(number, groups) for number, groups in torn if groups]
    # Ranks compute layers together: a rank with fewer parts to subtract makes empty passes to match the others.
    most = max(said["torn"] for said in policy.ranks.exchange({"torn": len(torn)})) if findings.left_out else 0
    for number, groups in (*torn, *[(0, set[int]())] * (most - len(torn))):
        only = _Only(groups)
        part = accumulate_gradient(policy, share[number], loss, proximal_N=proximal[number], scale=-scale, choice=only)
        # The removed part's sums enter with a minus sign. The last entry is a maximum, which cannot be subtracted, so
        # set it to 0.
        statistics.append(torch.cat((-part[:-1], torch.zeros_like(part[-1:]))))
    return statistics


@dataclass(frozen=True, slots=True)
class _NotLeftOut:
    """Keeps the groups in which the test for forged rollouts (`screen`) has found none."""

    findings: ScreenFindings
    is_screened: bool
    """True if the micro-batches are already screened. Else they are screened here."""

    def keep(self, batch: MicroBatch, logprobs_N: Tensor, distances_N: Tensor) -> Collection[int] | None:
        if not self.is_screened:
            _screen(self.findings, batch, logprobs_N, distances_N)
        left_out = self.findings.left_out
        return None if left_out.isdisjoint(batch.groups) else set(batch.groups) - left_out


@dataclass(frozen=True, slots=True)
class _Only:
    """Gives a gradient to the groups that the caller names, without looking at their tokens."""

    groups: Collection[int]

    def keep(self, batch: MicroBatch, logprobs_N: Tensor, distances_N: Tensor) -> Collection[int]:
        return self.groups


def _screen(findings: ScreenFindings, batch: MicroBatch, logprobs_N: Tensor, distances_N: Tensor) -> None:
    """Test the micro-batch's rollouts for forgery, and add the results to `findings`. Waits for the device, once."""
    logprobs, distances = torch.stack((logprobs_N, distances_N)).numpy(force=True)
    tokens = screen.ScreenedTokens(
        claims_N=batch.behavior_logprobs_N.numpy(),
        learner_logprobs_N=logprobs,
        distances_N=distances,
        lengths=batch.lengths,
    )
    findings.screened.append((tokens, batch.turns_N.numpy(), batch.numbers))
    forged = np.flatnonzero(screen.impossible(tokens)).tolist()
    findings.suspects.update(batch.numbers[rollout] for rollout in forged)
    findings.left_out.update(batch.groups[rollout] for rollout in forged)


def _dominant(
    policy: Policy,
    groups: Sequence[WeightedGroup],
    loss: StepLoss,
    settings: LearnerSettings,
    *,
    left_out: Collection[int],
) -> set[int]:
    """Return the indices of the rollouts that dominate an update's gradient. Clears all gradients.

    A group is examined if its gradient norm is at least half of the largest group's. In these groups, a rollout
    dominates if its norm is at least half of the largest rollout's. Every rank computes all of these norms.
    """

    def norm_of(group: WeightedGroup) -> float:
        for parameter in policy.parameters.values():
            parameter.grad = None
        for batch in build_micro_batches([group], micro_batch_tokens=settings.learner.tokens_at_once):
            accumulate_gradient(policy, batch, loss)
        gradients = [parameter.grad for parameter in policy.parameters.values() if parameter.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        return norm if math.isfinite(norm) else math.inf

    def longest(some: Sequence[WeightedGroup]) -> list[WeightedGroup]:
        norms = [norm_of(group) for group in some]
        return [group for group, norm in zip(some, norms, strict=True) if norm >= max(norms) / 2]

    suspected = longest([group for group in groups if group.number not in left_out])
    alone = [replace(group, rollouts=(rollout,)) for group in suspected for rollout in group.rollouts]
    found = {group.rollouts[0].number for group in longest(alone)}
    for parameter in policy.parameters.values():
        parameter.grad = None
    return found


def _total(ranks: TrainingRanks, statistics: Sequence[Tensor]) -> Tensor:
    """Combine the `Statistics` of all micro-batches of all ranks: float64 on the CPU; zeros if there are none."""
    if not statistics:
        return torch.zeros(len(STATISTICS), dtype=torch.float64)
    table = ranks.collect(torch.stack(list(statistics))).cpu().double()
    return torch.cat((table[:, :-1].sum(dim=0), table[:, -1:].amax(dim=0)))


@torch.no_grad()
def _at_start(policy: Policy, batch: MicroBatch, findings: ScreenFindings) -> Tensor:
    """Return the learner's logprobs [N] from before the step's first update, and test the rollouts for forgery."""
    logprobs_N, distances_N, _ = policy.screened(batch.to(policy.device))
    _screen(findings, batch, logprobs_N, distances_N)
    findings.count_screened()
    return logprobs_N


def _norm(policy: Policy, settings: TrainingConfig) -> float:
    """Sum the gradients over all ranks, clip them, and return their norm before clipping.

    With norm 0, for example if all rollouts are vetoed, callers skip the update: Adam's momentum would still move the
    weights.
    """
    policy.ranks.add_up(parameter.grad for parameter in policy.parameters.values() if parameter.grad is not None)
    return float(torch.nn.utils.clip_grad_norm_(policy.parameters.values(), settings.max_grad_norm))


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are finite: JSON and PostgreSQL cannot store others."""
    lost = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if lost:
        log.warning("metrics that are not finite are left out: %s", lost)
    return {name: value for name, value in metrics.items() if name not in lost}


def _step_metrics(groups: Sequence[TrainingGroup], step: WeightedStep, learner_version: int) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = [int(rollout.loss_mask.sum()) for rollout in rollouts]
    rewards = [[rollout.reward for rollout in group.rollouts] for group in groups]
    of_all = np.concatenate(rewards)
    return {
        "mean_reward": float(of_all.mean()),
        figures.REWARD_STD.key: float(of_all.std()),
        figures.REWARD_STD_WITHIN.key: float(np.mean([np.std(of_group) for of_group in rewards])),
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
        figures.COMPLETION_LENGTH.key: sum(tokens) / len(rollouts),
        figures.COMPLETION_LENGTH_MAX.key: float(max(tokens)),
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
        figures.ENTROPY.key: sums.entropy / sums.tokens,
    }
    if objective.correction != "none":
        metrics |= {
            figures.CORRECTION_WEIGHT.key: sums.correction_weight / sums.tokens,
            figures.CORRECTION_SHARE.key: sums.corrected / sums.tokens,
        }
    if objective.kl_coefficient:
        metrics[figures.BASE_KL.key] = sums.base_kl / sums.tokens
    return metrics
