"""Detect that the reward falls below its best level. Pure: no input or output.

A fall is measured relative to the gain, because rewards have no absolute scale. Means over `WINDOW` consecutive steps
are compared: the gain is the best mean minus the lowest mean before it. A fall must also exceed `SIGNIFICANT` standard
errors of the difference of two means. `SIGNIFICANT` is large because the best of many means is high by chance; three
standard errors would cause too many false alarms. The variance of a step's reward is estimated from the differences of
all consecutive steps (von Neumann), which learning hardly inflates. The variance within one window of 16 steps would
often be too low.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import Final

WINDOW: Final = 16
LOST: Final = 0.5
"""The reward counts as fallen after losing more than this share of the gain. The gain is the best window's mean minus
the lowest mean before it."""
SIGNIFICANT: Final = 6.0
RECOVERED: Final = 0.5
"""A fallen reward counts as recovered when the fall is below this share of one of the two limits: `LOST` of the gain,
or `SIGNIFICANT` standard errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """Mean rewards of the best and of the newest window."""

    best: float
    best_step: int
    """Last step of the best window."""
    now: float


@dataclass(frozen=True, slots=True)
class _Mean:
    mean: float
    step: int


class RewardTrend:
    """The mean rewards of the run's steps. Call `add` once for each trained step, in order."""

    def __init__(self) -> None:
        self.step = 0
        self._rewards: deque[float] = deque(maxlen=WINDOW)
        self._now: _Mean | None = None
        self._best: _Mean | None = None
        self._lowest = 0.0
        """Lowest mean before the best window."""
        self._lowest_so_far = 0.0
        self._squares = 0.0
        """Sum of squared differences between consecutive steps' rewards."""
        self._num_squares = 0

    def add(self, step: int, mean_reward: float) -> None:
        self.step = step
        if self._rewards:
            self._squares += (mean_reward - self._rewards[-1]) ** 2
            self._num_squares += 1
        self._rewards.append(mean_reward)
        if len(self._rewards) < WINDOW:
            return
        self._now = now = _Mean(fmean(self._rewards), step)
        self._lowest_so_far = now.mean if self._best is None else min(self._lowest_so_far, now.mean)
        if self._best is None or now.mean >= self._best.mean:
            self._best, self._lowest = now, self._lowest_so_far

    def fall(self, *, has_fallen: bool) -> Fall | None:
        """Return the fall from the best window. Return None for a fall below LOST of the gain, or within chance.

        If `has_fallen`, the reward had already fallen before this step. Then half of both limits is enough for a fall.
        """
        best, now = self._best, self._now
        if best is None or now is None:
            return None
        variance = self._squares / self._num_squares / 2
        lost, chance = best.mean - now.mean, SIGNIFICANT * sqrt(2 * variance / WINDOW)
        least = LOST * (best.mean - self._lowest) * (RECOVERED if has_fallen else 1.0)
        if lost <= 0 or lost < least or lost <= chance * (RECOVERED if has_fallen else 1.0):
            return None
        return Fall(best=best.mean, best_step=best.step, now=now.mean)
