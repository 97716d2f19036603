"""Compute each rollout's advantage and the weight of its tokens in the loss, from a step's groups.

Everything is decided here, on the host, for the whole step. The loss is Σ weight · loss over tokens, so the split into
micro-batches or processes does not change it. In this order:

    reward      minus DAPO's soft penalty, if `objective.overlong` is "penalty"
    advantage   of every rollout, or of each of its turns (`credit`), against its group. Rollouts left out below still
                count in the mean and standard deviation (as in DAPO and TRL: they are part of what the prompt
                makes likely)
    left out    truncated rollouts, if `objective.overlong` is "mask"; then those that `objective.selection` does not
                choose. They do not count in the denominators below, for any aggregation (TRL counts them in N for
                grpo and dr_grpo). A rollout that `objective.shuffle_batches` chooses n times counts n times, in
                denominators and loss
    update      if a step has several (`training.updates_per_step`): the update that uses the rollout. Sub-batches are
                dealt to the updates in turn; without sub-batches, the groups that must be computed are dealt
    weight      of each token of rollout i, by `objective.aggregation`. N rollouts remain, in M groups; T_i is the
                number of drawn tokens of rollout i

    token_mean      1 / Σ_j T_j
    sequence_mean   1 / (N T_i)
    group_mean      1 / (M Σ_j T_j), j in the group
    constant        1 / (N sampling.max_tokens)
    training.tokens_per_step Φ > 0: 1 / Φ, for any aggregation (C3PO of Ring-lite, arXiv 2506.14731)

Remaining rollouts without advantage count in the denominators, but are not computed. If KL or entropy has a weight,
such rollouts have a gradient and are computed. With an entropy target they are computed in every step, so that steps
whose entropy weight is 0 measure the entropy of the same kind of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.learner.credit import EpisodeRewards, Values, turn_advantages
from echo_hub.learner.selection import times_trained
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout, no_draws

Times = Sequence[NDArray[np.int64]]
"""How often each rollout counts: an array [G] for each group of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedRollout:
    """A rollout as it enters the loss, with the shapes of `TrainingRollout`. `weight` applies to each of its drawn
    tokens.
    """

    completion_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float64]
    """Advantage of each drawn token [N]."""
    weight: float
    draws: NDArray[np.uint64] = field(default_factory=no_draws)
    routes: bytes = b""
    number: int = 0
    """Index of the rollout among all rollouts of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedGroup:
    """The computed rollouts of one prompt: those that affect the gradient."""

    prompt_ids: NDArray[np.int32]
    rollouts: tuple[WeightedRollout, ...]
    number: int = 0
    """Index of the group among all groups of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedStep:
    """The rollouts of a step that must be computed. Groups and updates without such rollouts are left out."""

    updates: tuple[tuple[WeightedGroup, ...], ...]
    """Groups of each optimizer update, in order, with their weights in the whole step's loss."""
    divides_groups: bool
    """True if several updates may contain rollouts of one group, or the same rollout."""
    groups_without_advantage: int
    """Number of groups whose rewards (after any penalty) are equal up to rounding; with `training.credit` = "turn",
    groups whose returns are equal in every turn.
    """
    rollouts_masked: int
    """Number of rollouts left out because they were truncated."""
    rollouts_unselected: int


def weigh(groups: Sequence[TrainingGroup], settings: LearnerSettings, *, learner_version: int = 0) -> WeightedStep:
    """Return the rollouts of a step that must be computed, with advantages and weights. Equal inputs give equal
    results.
    """
    objective = settings.objective.resolved()
    rewards = [[_rewards(rollout, settings) for rollout in group.rollouts] for group in groups]
    values = turn_advantages(rewards, settings.training, objective.chosen_advantage)
    present = [np.array([of_turns.any() for of_turns in of_group]) for of_group in values]
    complete = [
        np.array([objective.overlong != "mask" or not rollout.truncated for rollout in group.rollouts])
        for group in groups
    ]
    drawn = _sub_batches(values, complete, settings, learner_version)
    times = _together(drawn)
    lengths = [np.array([rollout.loss_mask.sum() for rollout in group.rollouts]) for group in groups]
    weights = _weights(lengths, times, settings)
    whole = objective.kl_coefficient > 0 or objective.trains_entropy
    computed = [[often * (some | whole) for often, some in zip(one, present, strict=True)] for one in drawn]
    updates = [_weighted(groups, values, weights, one) for one in _dealt(computed, settings.training.updates_per_step)]
    return WeightedStep(
        updates=tuple(filter(None, updates)),
        divides_groups=len(drawn) > 1 and len(updates) > 1,
        groups_without_advantage=sum(not some.any() for some in present),
        rollouts_masked=sum(int((~there).sum()) for there in complete),
        rollouts_unselected=sum(int((a & (often == 0)).sum()) for a, often in zip(complete, times, strict=True)),
    )


def _rewards(rollout: TrainingRollout, settings: LearnerSettings) -> EpisodeRewards:
    """Return the rewards of one episode. A penalty for length is part of the last turn's reward."""
    last_turn = int(np.logical_and.accumulate(rollout.loss_mask[::-1]).sum())
    penalty = overlong_penalty(last_turn, settings.objective, max_tokens=settings.max_tokens)
    num_earlier = max(0, len(rollout.draws) - 1)
    earlier = rollout.turn_rewards.tolist() or [0.0] * num_earlier
    return EpisodeRewards(reward=rollout.reward + penalty, turn_rewards=earlier)


def overlong_penalty(num_tokens: int, objective: ObjectiveConfig, *, max_tokens: int) -> float:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): it falls from 0 to -1 over the last
    `objective.overlong_buffer_tokens` tokens before the limit.

    Return 0 unless `objective.overlong` is "penalty". With several turns, `num_tokens` is that of the last one, because
    the limit applies to each turn.
    """
    if objective.overlong != "penalty":
        return 0.0
    buffer = objective.overlong_buffer_tokens
    return -float(np.clip((num_tokens - (max_tokens - buffer)) / buffer, 0, 1))


def _sub_batches(
    values: Sequence[Values], complete: Sequence[NDArray[np.bool_]], settings: LearnerSettings, learner_version: int
) -> Sequence[Times]:
    """Return how often each rollout counts in each sub-batch. There is one sub-batch unless `objective.shuffle_batches`
    draws several.
    """
    objective = settings.objective
    if objective.selection == "all":
        return [[there.astype(np.int64) for there in complete]]
    return times_trained(
        [np.array([of_turns[0] for of_turns in value]) for value in values],
        complete,
        sub_batches=objective.shuffle_batches,
        rng=np.random.default_rng([settings.seed, learner_version]),
    )


def _together(sub_batches: Sequence[Times]) -> Times:
    return [np.sum(of_group, axis=0) for of_group in zip(*sub_batches, strict=True)]


def _dealt(sub_batches: Sequence[Times], updates: int) -> list[Times]:
    """Return how often each rollout counts in each update.

    Several sub-batches are distributed over the updates in turn. A single sub-batch is split: its groups are
    distributed.
    """
    if len(sub_batches) > 1:
        return [_together(sub_batches[first::updates]) for first in range(min(updates, len(sub_batches)))]
    (times,) = sub_batches
    there = [number for number, often in enumerate(times) if often.any()]
    shares = [there[first::updates] for first in range(updates)]
    return [[often * (number in share) for number, often in enumerate(times)] for share in shares]


def _weights(
    lengths: Sequence[NDArray[np.int64]], times: Times, settings: LearnerSettings
) -> list[NDArray[np.float64]]:
    """Return a weight for each rollout, [G] for each group: the weight of each of its tokens, before multiplication by
    the rollout's count.

    `times` is how often each rollout counts in the whole step. A group counts once.
    """
    rollouts = sum(int(often.sum()) for often in times)
    groups = sum(bool(often.any()) for often in times)
    tokens = [int((length * often).sum()) for length, often in zip(lengths, times, strict=True)]
    aggregation = settings.objective.chosen_aggregation
    if settings.training.tokens_per_step:
        return [np.full(len(often), 1 / settings.training.tokens_per_step) for often in times]

    def of_group(length: NDArray[np.int64], own_tokens: int) -> NDArray[np.float64]:
        match aggregation:
            case "token_mean":
                return np.full(len(length), 1 / sum(tokens))
            case "sequence_mean":
                return 1 / (rollouts * length)
            case "group_mean":
                return np.full(len(length), 1 / (groups * own_tokens))
            case "constant":
                return np.full(len(length), 1 / (rollouts * settings.max_tokens))
            case _:
                assert_never(aggregation)

    return [
        of_group(length, own) if own else np.zeros(len(length)) for length, own in zip(lengths, tokens, strict=True)
    ]


def _weighted(
    groups: Sequence[TrainingGroup], values: Sequence[Values], weights: Sequence[NDArray[np.float64]], times: Times
) -> tuple[WeightedGroup, ...]:
    """Return the groups of one optimizer update, without rollouts that need no computation. `times` is how often each
    rollout counts in the update.
    """
    found = []
    first = 0
    for number, (group, value, weight, often) in enumerate(zip(groups, values, weights, times, strict=True)):
        rollouts = tuple(
            WeightedRollout(
                completion_ids=rollout.completion_ids,
                loss_mask=rollout.loss_mask,
                behavior_logprobs=rollout.behavior_logprobs,
                advantages=_of_tokens(value[index], rollout),
                weight=float(weight[index] * often[index]),
                draws=rollout.draws,
                routes=rollout.routes,
                number=first + index,
            )
            for index, rollout in enumerate(group.rollouts)
            if often[index]
        )
        if rollouts:
            found.append(WeightedGroup(number=number, prompt_ids=group.prompt_ids, rollouts=rollouts))
        first += len(group.rollouts)
    return tuple(found)


def _of_tokens(advantages_of_turns: NDArray[np.float64], rollout: TrainingRollout) -> NDArray[np.float64]:
    drawn = rollout.draws[:, 2].astype(np.int64) if len(rollout.draws) else int(rollout.loss_mask.sum())
    return np.repeat(advantages_of_turns, drawn)
