"""Rewards with their components; when rewards count as equal, and what is still to come at each turn of an episode: the
ledger's and the learner's groups without advantage are the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

RELATIVE_TOLERANCE: Final = 1e-9
"""Far above float64's rounding, far below any difference that a task means: 0.1 + 0.2 and 0.3 are equal."""


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ by no more than rounding; true of none and of one."""
    if not rewards:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= RELATIVE_TOLERANCE * max(1.0, abs(low), abs(high))


class Reward(float):
    """A reward that knows its components, each under its name, before they are weighed."""

    components: Mapping[str, float]

    def __new__(cls, value: float, components: Mapping[str, float]) -> Reward:
        made = super().__new__(cls, value)
        made.components = components
        return made


def components_of(reward: float) -> Mapping[str, float] | None:
    """None where the reward is the task's alone."""
    return reward.components if isinstance(reward, Reward) else None


def mean_components(of_each: Iterable[Mapping[str, float] | None]) -> dict[str, float] | None:
    """The mean of each component over the rewards that have it; None where none has any."""
    found: dict[str, list[float]] = {}
    for components in of_each:
        for name, value in (components or {}).items():
            found.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in found.items()} or None


def returns(reward: float, turn_rewards: Sequence[float], *, discount: float) -> list[float]:
    """For each turn of an episode what it and those behind it have earned, each further one `discount` times as much.

    `turn_rewards`: of all turns but the last, which has earned the rest of the episode's `reward`.
    """
    found = [reward - math.fsum(turn_rewards)]
    for earned in reversed(turn_rewards):
        found.append(earned + discount * found[-1])
    return found[::-1]


def of_each_turn(episodes: Sequence[Sequence[float]]) -> list[list[float]]:
    """For each turn the returns of all episodes that came to it, in their order. `episodes`: the `returns` of each."""
    most = max(map(len, episodes), default=0)
    return [[found[turn] for found in episodes if turn < len(found)] for turn in range(most)]
