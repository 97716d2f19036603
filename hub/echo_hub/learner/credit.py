"""The advantage of each turn of an episode: the episode's own, or one for each turn.

With `training.credit` = "turn", computed from the rewards r_1 .. r_T of an episode's turns, which add up to its reward:

    return       G_t = Σ_{s >= t} γ^(s - t) r_s, γ = training.discount
    advantage    G_t minus the mean of G_t over the group's episodes that reached turn t (leave_one_out: over the
                 others); mean_std: divided by the pooled deviation of all the group's returns from their turns'
                 means; batch_std: divided by the deviation of all returns of the step

One pooled deviation serves all turns of a group: a deviation for each turn would scale up two episodes that hardly
differ.

Sources: sums of later rewards, compared within a group, are GRPO's process supervision (DeepSeekMath, arXiv 2402.03300,
section 4.1.3). Discounted returns compared between steps are the micro level of GiGPO (arXiv 2505.10978). Departures:
DeepSeekMath first normalises the rewards of all steps together, then sums them. GiGPO compares steps of a group at the
same state, which needs recurring states, and adds the episode's advantage. Here a return is compared with returns of
the same turn, without adding the episode's advantage.

No critic is needed (ArCHer, arXiv 2402.19446, trains one). The baseline is other episodes' returns from this turn on.
They do not depend on this episode's action in the turn, so the baseline adds no bias. An episode's own share in the
group's mean and deviation does add bias, as in GRPO; `leave_one_out` avoids it. With γ = 1, rewards of earlier turns
cancel too: G_t is the episode's reward minus its earlier rewards. So the expected gradient has the direction of the
episode's reward, however an environment splits it over turns (for rewards that are differences of a potential: Ng,
Harada and Russell, ICML 1999). Distinguishing turns only reduces noise. A turn that only one episode reached has no
advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from echo_hub.config.objective_defaults import Advantage
from echo_hub.config.training_sections import TrainingConfig
from echo_hub.learner.advantages import STD_EPSILON, advantages, centred, standard_deviation
from echo_shared.records.rewards import of_each_turn, returns

Values = list[NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRewards:
    """The rewards of one episode. `turn_rewards` [turns - 1] are the parts of `reward` that all turns except the last
    earned.
    """

    reward: float
    turn_rewards: Sequence[float] = ()


def turn_advantages(
    groups: Sequence[Sequence[EpisodeRewards]], training: TrainingConfig, kind: Advantage
) -> list[Values]:
    """Return the advantages [turns] of each episode of each group. `kind` selects the formula, as in `advantages`."""
    if training.credit == "episode":
        whole = advantages([np.array([episode.reward for episode in group]) for group in groups], kind)
        return [
            [np.full(1 + len(episode.turn_rewards), value) for episode, value in zip(group, values, strict=True)]
            for group, values in zip(groups, whole, strict=True)
        ]
    by_turn = [
        [
            np.array(values)
            for values in of_each_turn(
                [returns(one.reward, one.turn_rewards, discount=training.discount) for one in group]
            )
        ]
        for group in groups
    ]
    return [_of_episodes(group, of_turns) for group, of_turns in zip(groups, _compared(by_turn, kind), strict=True)]


def _compared(groups: Sequence[Values], kind: Advantage) -> list[Values]:
    """Compute each episode's return G_t minus the group's mean return in turn t, scaled by the formula `kind`. `groups`
    holds the returns of each group by turn.
    """
    less_mean = [[centred(values) for values in of_turns] for of_turns in groups]
    match kind:
        case "mean":
            scales = [[1.0] * len(of_turns) for of_turns in groups]
        case "mean_std":
            scales = [[1 / (_pooled_std(of_turns) + STD_EPSILON)] * len(of_turns) for of_turns in less_mean]
        case "batch_std":
            every = np.concatenate([values for of_turns in groups for values in of_turns])
            scales = [[1 / (standard_deviation(every) + STD_EPSILON)] * len(of_turns) for of_turns in groups]
        case "leave_one_out":
            scales = [[len(values) / max(1, len(values) - 1) for values in of_turns] for of_turns in groups]
        case _:
            assert_never(kind)
    return [
        [scale * values for scale, values in zip(of_scales, of_turns, strict=True)]
        for of_scales, of_turns in zip(scales, less_mean, strict=True)
    ]


def _pooled_std(less_mean: Values) -> float:
    squares = sum(float((values**2).sum()) for values in less_mean)
    return float(np.sqrt(squares / max(1, sum(len(values) - 1 for values in less_mean))))


def _of_episodes(group: Sequence[EpisodeRewards], by_turn: Sequence[NDArray[np.float64]]) -> Values:
    """Regroup values from turn by turn (all episodes that reached the turn) to episode by episode."""
    left = [iter(values) for values in by_turn]
    return [np.array([next(left[turn]) for turn in range(1 + len(episode.turn_rewards))]) for episode in group]
