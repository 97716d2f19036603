"""The learner's tempo: when each step will begin, and how long before that its rollouts are to be asked for.

A rollout ages while it waits, so the work for a step is *released* as late as keeps the learner busy:

    begins(j)    when step j is likely to begin: steps before it take as long as the median of recent ones; before any
                 is trained, as long as the learner has been at the first
    lead_s(...)  what the pool needs for a step's rollouts and for the last of them, times `margin`
    margin       grows when the learner had to wait for a batch, by what it waited; shrinks a little each time that a
                 batch lay ready for longer than `READY` of a step

So until the learner begins everything is released: how far ahead is far enough, nobody knows. From then on, the longer
the first step takes, the less is released ahead.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

RECENT: Final = 8
READY: Final = 0.05
"""A batch is to be complete so long before the learner is free, over a step's time."""
FIRST_MARGIN: Final = 1.2
MOST_MARGIN: Final = 8.0
LEAST_MARGIN: Final = 1.0
_DOWN: Final = 0.4
"""How fast the margin shrinks, for each batch that lies ready for a whole step too long."""


class Tempo:
    """Steps are told of in their order; they count from 1."""

    def __init__(self) -> None:
        self.step_s: float | None = None
        """None: no step has been trained yet."""
        self.margin = FIRST_MARGIN
        self._steps_s: deque[float] = deque(maxlen=RECENT)
        self._ends: deque[float] = deque(maxlen=RECENT)
        """When recent steps ended."""
        self._begun: tuple[int, float] | None = None
        """The step that the learner is at, and since when."""
        self._done_at: float | None = None
        """When the learner ended its last step, if nothing has happened to it since."""
        self._given = 0
        """The newest step that the learner was given."""
        self._filled = 0
        """The newest step whose groups were all complete."""
        self._filled_at: dict[int, float] = {}
        """When those of each step were that the learner has not come to."""

    def given(self, step: int, now: float) -> None:
        """The learner has this step, and begins with it as soon as it is free."""
        self._given = step
        if self._begun is None:
            self._begun = (step, now)

    def done(self, step: int, now: float) -> None:
        """The learner has trained it."""
        if self._begun is not None and self._begun[0] == step:
            self._steps_s.append(now - max(self._begun[1], self._done_at or 0.0))
            self.step_s = median(self._steps_s)
            self._ends.append(now)
            if step + 1 in self._filled_at:
                self._lay_ready(now - self._filled_at[step + 1])
        self._filled_at = {later: at for later, at in self._filled_at.items() if later > step}
        self._begun, self._done_at = (step + 1, now) if self._given > step else None, now

    def lost(self) -> None:
        """The learner is gone: nobody knows when it begins."""
        self._begun = self._done_at = None
        self._ends.clear()
        self._given = 0

    def filled(self, step: int, now: float) -> None:
        """Enough groups are complete for all steps up to this one."""
        if step <= self._filled:
            return
        if self._done_at is not None and self._begun is None and self.step_s:
            self.margin = min(MOST_MARGIN, self.margin * (1.0 + min(1.0, (now - self._done_at) / self.step_s)))
        self._filled_at.update(dict.fromkeys(range(self._filled + 1, step + 1), now))
        self._filled = step

    def begins(self, step: int, *, next_step: int, now: float) -> float:
        """When `step` is likely to begin, if rollouts are there in time. `next_step`: the first without a batch."""
        if self._begun is None:
            return now + (step - next_step) * (self.step_s or 0.0)
        current, since = self._begun
        step_s = now - since if self.step_s is None else self.step_s
        return max(now, since + step_s) + max(0, step - current - 1) * step_s

    @property
    def every_s(self) -> float:
        """From one step to the next, the learner's waiting included; at least what a step takes."""
        between = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) if len(self._ends) > 1 else 0.0
        return max(self.step_s or 0.0, between)

    @property
    def waits(self) -> bool:
        """Whether the learner has nothing to do, or nobody knows what it does."""
        return self._begun is None

    def lead_s(self, pool_s: float, typical_s: float) -> float:
        """How long before a step begins its work is to begin: the pool needs `pool_s` for all of it, and a typical node
        `typical_s` for one rollout."""
        return self.margin * (pool_s + typical_s)

    def _lay_ready(self, seconds: float) -> None:
        if self.step_s:
            too_long = min(1.0, seconds / self.step_s) - READY
            self.margin = max(LEAST_MARGIN, self.margin * (1.0 - _DOWN * max(0.0, too_long)))
