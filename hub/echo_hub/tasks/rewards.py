"""Valid rewards of a task: finite numbers between its bounds, which are 0 and 1 by default.

If a scorer returns any other value, the scorer has failed: one NaN, or 1e30 among zeros and ones, would ruin the means
of groups and evaluations.
"""

from __future__ import annotations

import math
import re
import reprlib
from dataclasses import dataclass
from typing import Final, SupportsFloat

from echo_hub.tasks.base import BoundedTask, Task
from echo_hub.tasks.environments.base import AnyEnvironment
from echo_shared.errors import ConfigError, ScorerError
from echo_shared.records.rewards import components_of

MAX_REWARD: Final = 1e6
"""Largest absolute reward of any task. Larger ones would overflow, because the learner squares differences of rewards
in float32."""
ROUNDING: Final = 1e-6
"""Tolerance for rounding, as a share of the difference between the bounds. Rewards that exceed a bound by less count as
equal to the bound. Rewards that miss the highest reward by less count as solved."""


SCORE: Final = "score"
"""Name of the component that is the task's own reward."""
COMPONENT_NAME: Final = re.compile(r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")
"""Valid names of components. They become parts of metric names, and pages show them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBounds:
    """Lowest and highest possible reward of a task. Both values are included."""

    lowest: float = 0.0
    highest: float = 1.0
    of_score: RewardBounds | None = None
    """Bounds of the component `score`, if the reward is a sum of several components."""

    @classmethod
    def of(cls, task: Task | AnyEnvironment) -> RewardBounds:
        """Return the bounds that the task declares. Raises ConfigError unless these are two finite numbers in ascending
        order."""
        declared: object = task.reward_bounds if isinstance(task, BoundedTask) else (0.0, 1.0)
        match declared:
            case (int() | float() as low, int() | float() as high) if -MAX_REWARD <= low < high <= MAX_REWARD:
                return cls(lowest=float(low), highest=float(high))
        raise ConfigError(
            "The bounds of the task's rewards are not valid.",
            got=f"reward_bounds = {reprlib.repr(declared)} of {task.name}",
            do=f"Declare two numbers from {-MAX_REWARD:,.0f} to {MAX_REWARD:,.0f}, the lower one first: (0.0, 1.0).",
        )

    def read(self, given: object) -> float:
        """Convert a scorer's result to a reward. Raises ScorerError if it is not a valid reward."""
        # Test the type first: float() would also convert texts such as "1", which are no rewards.
        reward = float(given) if isinstance(given, float | int | SupportsFloat) else math.nan
        if not self.hold(reward):
            bounds = f"from {self.lowest:g} to {self.highest:g}"
            raise ScorerError(f"The reward is {reprlib.repr(given)}; this task's are numbers {bounds}.")
        return min(max(reward, self.lowest), self.highest)

    def read_turn(self, given: object) -> float:
        """Convert the reward of a turn. Raises ScorerError unless its absolute value is finite and at most the
        difference between the bounds.
        """
        reward = float(given) if isinstance(given, float | int | SupportsFloat) else math.nan
        most = self.highest - self.lowest
        if not abs(reward) <= (1 + ROUNDING) * most:
            raise ScorerError(
                f"The reward of a turn is {reprlib.repr(given)}; this task's are numbers from {-most:g} to {most:g}."
            )
        return reward

    def hold(self, reward: float) -> bool:
        """Return True if a reward is finite and within the bounds, apart from rounding."""
        slack = ROUNDING * (self.highest - self.lowest)
        return self.lowest - slack <= reward <= self.highest + slack

    @property
    def solved_at(self) -> float:
        """Lowest reward with which a problem counts as solved. A task may give a lower reward for an answer that has
        only the right form."""
        return self.highest - ROUNDING * (self.highest - self.lowest)

    def is_solved(self, reward: float) -> bool:
        """Return True if the reward solves its problem. With several components, the task's own score decides."""
        components = components_of(reward)
        if self.of_score is not None and components is not None and SCORE in components:
            return self.of_score.is_solved(components[SCORE])
        return reward >= self.solved_at
