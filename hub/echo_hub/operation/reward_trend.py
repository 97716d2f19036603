"""Whether the reward has fallen: of the newest steps, against the best that there were. Pure.

Rewards have no scale of their own, so a fall is measured by what was gained: of the means over `WINDOW` steps in a row,
the best less the lowest before it. It must be larger than chance takes as well: than `SIGNIFICANT` standard errors of
the difference of the two means. The best of many means is high by chance, so three would come too often. The spread of
a step's reward is found from all differences between a step and the next, which a run that learns makes no larger (von
Neumann's estimate; the 16 steps of a mean alone would often seem to spread far too little).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import Final

WINDOW: Final = 16
SIGNIFICANT: Final = 6.0
RECOVERED: Final = 0.5
"""A fall is over when less than this share of it is left, or when it may be chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """Mean rewards of the best window and of the newest."""

    best: float
    best_step: int
    """The last of the best window."""
    now: float


@dataclass(frozen=True, slots=True)
class _Mean:
    mean: float
    step: int


class RewardTrend:
    """`add` each trained step once, in order."""

    def __init__(self) -> None:
        self.step = 0
        """The newest that was added."""
        self._rewards: deque[float] = deque(maxlen=WINDOW)
        self._now: _Mean | None = None
        self._best: _Mean | None = None
        self._lowest = 0.0
        """Before the best."""
        self._lowest_so_far = 0.0
        self._squares = 0.0
        """Sum over all differences between a step's reward and the next one's."""
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

    def fall(self, share: float, *, has_fallen: bool) -> Fall | None:
        """The fall, if it is of `share` of the gain at least; less is enough to go on with one that `has_fallen`."""
        best, now = self._best, self._now
        if best is None or now is None:
            return None
        variance = self._squares / self._num_squares / 2
        lost, chance = best.mean - now.mean, SIGNIFICANT * sqrt(2 * variance / WINDOW)
        least = share * (best.mean - self._lowest) * (RECOVERED if has_fallen else 1.0)
        if lost <= 0 or lost < least or lost <= chance * (RECOVERED if has_fallen else 1.0):
            return None
        return Fall(best=best.mean, best_step=best.step, now=now.mean)
