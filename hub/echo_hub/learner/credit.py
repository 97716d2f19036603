"""Which advantage each turn of an episode has: its episode's, or one of its own.

With `training.credit` = "turn", from the rewards r_1 .. r_T of an episode's turns, which add up to the episode's:

    return       G_t = Σ_{s >= t} γ^(s - t) r_s, γ = training.discount
    advantage    G_t less the mean of the G_t of all episodes of the group that came to turn t (leave_one_out: of the
                 others); mean_std: over the deviation of all the group's returns from the means of their turns, one
                 for all turns, for one of each would make as much of two episodes that hardly differ as of any;
                 batch_std: over that of all returns of the step

Sources: sums of what follows, against a group, are the process supervision of GRPO (DeepSeekMath, arXiv 2402.03300,
section 4.1.3); discounted returns among steps, the micro level of GiGPO (arXiv 2505.10978). Departures: DeepSeekMath
normalises the rewards of all steps together and adds them up then; GiGPO compares a step with those of its group at the
same state, which needs states that come again, and adds the episode's advantage on top. Here returns are compared with
those of the same turn, and nothing is added.

No critic is needed (ArCHer, arXiv 2402.19446, trains one): what others of the group got from a turn on does not depend
on what this episode said in it, and so shifts no gradient in the mean, but for the share that the episode itself has in
its group's mean and deviation, as in GRPO; with `leave_one_out` there is none. With γ = 1 that holds for the rewards of
earlier turns too: G_t is the episode's reward less what it had earned by then. So the gradient has the direction of the
episode's reward in the mean, whatever part of it an environment gives to which turn (for rewards that are differences
of a potential: Ng, Harada and Russell, ICML 1999), and less noise where turns are told apart. A turn that only one
episode came to has no advantage.
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
from echo_shared.rewards import of_each_turn, returns

Values = list[NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRewards:
    """`turn_rewards` [turns - 1]: what of `reward` each turn but the last has earned."""

    reward: float
    turn_rewards: Sequence[float] = ()


def turn_advantages(
    groups: Sequence[Sequence[EpisodeRewards]], training: TrainingConfig, kind: Advantage
) -> list[Values]:
    """The advantages [turns] of each episode of each group, by `kind` as `advantages` has it."""
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
    """Each return less the mean of its turn's, as `kind` says; `groups` have those of each turn."""
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
    """Of a group's returns around the means of their turns: one deviation for all of its turns."""
    squares = sum(float((values**2).sum()) for values in less_mean)
    return float(np.sqrt(squares / max(1, sum(len(values) - 1 for values in less_mean))))


def _of_episodes(group: Sequence[EpisodeRewards], by_turn: Sequence[NDArray[np.float64]]) -> Values:
    """From the values of all that came to each turn to those of each episode."""
    left = [iter(values) for values in by_turn]
    return [np.array([next(left[turn]) for turn in range(1 + len(episode.turn_rewards))]) for episode in group]
