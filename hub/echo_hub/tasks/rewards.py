"""The rewards that a task may give: finite numbers from its lowest to its highest, by default from 0 to 1.

Whatever else a scorer returns is its failure, never a reward: one NaN, or one 1e30 among zeros and ones, would drown
the mean of its group and of its evaluation.
"""

from __future__ import annotations

import math
import re
import reprlib
from dataclasses import dataclass
from typing import Final, SupportsFloat

from echo_hub.tasks.base import BoundedTask, Task
from echo_hub.tasks.environments.base import Environment
from echo_shared.errors import ConfigError, ScorerError
from echo_shared.rewards import components_of

MAX_REWARD: Final = 1e6
"""The largest reward of any task, in size: the learner's float32 squares differences of rewards."""
ROUNDING: Final = 1e-6
"""As a share of the span between the bounds: so far beyond a bound a reward still counts as the bound, and so far below
the highest a problem still counts as solved."""


SCORE: Final = "score"
"""The component that is the task's own reward."""
COMPONENT_NAME: Final = re.compile(r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")
"""Names of components stand in the names of figures, and on pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBounds:
    """The bounds of a task's rewards; both are possible rewards."""

    lowest: float = 0.0
    highest: float = 1.0
    of_score: RewardBounds | None = None
    """Of the component `score`, where a reward has several."""

    @classmethod
    def of(cls, task: Task | Environment) -> RewardBounds:
        """The bounds that the task declares. Raises ConfigError unless it is two finite numbers, the lower one
        first."""
        declared: object = task.reward_bounds if isinstance(task, BoundedTask) else (0.0, 1.0)
        match declared:
            case (int() | float() as low, int() | float() as high) if -MAX_REWARD <= low < high <= MAX_REWARD:
                return cls(lowest=float(low), highest=float(high))
        raise ConfigError(
            "The task does not say between which bounds its rewards are.",
            got=f"reward_bounds = {reprlib.repr(declared)} of {task.name}",
            do=f"Declare two numbers from {-MAX_REWARD:,.0f} to {MAX_REWARD:,.0f}, the lower one first: (0.0, 1.0).",
        )

    def read(self, given: object) -> float:
        """What a scorer has returned, as a reward. Raises ScorerError for what is none."""
        # Text is no number, even "1".
        reward = float(given) if isinstance(given, float | int | SupportsFloat) else math.nan
        if not self.hold(reward):
            bounds = f"from {self.lowest:g} to {self.highest:g}"
            raise ScorerError(f"The reward is {reprlib.repr(given)}; this task's are numbers {bounds}.")
        return min(max(reward, self.lowest), self.highest)

    def read_turn(self, given: object) -> float:
        """What a turn has earned, of the reward of its episode. Raises ScorerError for what is no finite number, or
        further from 0 than the bounds are from each other."""
        reward = float(given) if isinstance(given, float | int | SupportsFloat) else math.nan
        most = self.highest - self.lowest
        if not abs(reward) <= (1 + ROUNDING) * most:
            raise ScorerError(
                f"The reward of a turn is {reprlib.repr(given)}; this task's are numbers from {-most:g} to {most:g}."
            )
        return reward

    def hold(self, reward: float) -> bool:
        """Whether a reward is finite and within the bounds, but for rounding."""
        slack = ROUNDING * (self.highest - self.lowest)
        return self.lowest - slack <= reward <= self.highest + slack

    @property
    def solved_at(self) -> float:
        """The lowest reward of a problem that is solved: graders give less for a right form alone."""
        return self.highest - ROUNDING * (self.highest - self.lowest)

    def is_solved(self, reward: float) -> bool:
        """Whether a problem with this reward is solved. Of a reward with several components the task's own says so."""
        components = components_of(reward)
        if self.of_score is not None and components is not None and SCORE in components:
            return self.of_score.is_solved(components[SCORE])
        return reward >= self.solved_at
