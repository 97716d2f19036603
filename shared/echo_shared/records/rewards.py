"""Rewards with components, comparison of rewards, and returns per turn of an episode.

Hub and learner share `all_equal`, so both agree on the groups without advantage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

RELATIVE_TOLERANCE: Final = 1e-9
"""Relative difference up to which rewards are equal: far above float64 rounding (0.1 + 0.2 equals 0.3), far below any
intended difference.
"""


def all_equal(rewards: Sequence[float]) -> bool:
    """Return True if the rewards differ by rounding at most. True for zero or one reward."""
    if not rewards:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= RELATIVE_TOLERANCE * max(1.0, abs(low), abs(high))


class Reward(float):
    """A reward with its components: named values, before weighting."""

    components: Mapping[str, float]

    def __new__(cls, value: float, components: Mapping[str, float]) -> Reward:
        made = super().__new__(cls, value)
        made.components = components
        return made


def components_of(reward: float) -> Mapping[str, float] | None:
    """Return the reward's components; None if the reward is a plain score without components."""
    return reward.components if isinstance(reward, Reward) else None


def mean_components(of_each: Iterable[Mapping[str, float] | None]) -> dict[str, float] | None:
    """Return each component's mean over the rewards that have it; None if no reward has components."""
    found: dict[str, list[float]] = {}
    for components in of_each:
        for name, value in (components or {}).items():
            found.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in found.items()} or None


def returns(reward: float, turn_rewards: Sequence[float], *, discount: float) -> list[float]:
    """Compute the return of each turn of an episode: the turn's reward plus `discount` times the next turn's return.

    `turn_rewards` has the rewards of all turns but the last. The last turn gets what remains of the episode's `reward`.
    """
    found = [reward - math.fsum(turn_rewards)]
    for earned in reversed(turn_rewards):
        found.append(earned + discount * found[-1])
    return found[::-1]


def of_each_turn(episodes: Sequence[Sequence[float]]) -> list[list[float]]:
    """Group returns by turn: return one list for each turn, with this turn's return in every episode that has the turn.

    `episodes` holds each episode's returns, one return per turn.
    """
    most = max(map(len, episodes), default=0)
    return [[found[turn] for found in episodes if turn < len(found)] for turn in range(most)]
