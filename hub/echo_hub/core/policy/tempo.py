"""Timing of the learner: expected start of each step, and lead time for leasing its groups.

A rollout becomes stale while it waits. So a step's work is *released* (nodes may lease it) as late as possible without
letting the learner wait:

    begins(j)    expected start of step j, if each earlier step takes the median time of recent steps. Before any step
                 is trained, the time spent on the first step so far is used instead
    lead_s(...)  seconds from release to start: the pool's time for a step's rollouts plus one typical rollout, times
                 `margin`
    margin       safety factor: grows with the time for which the learner waited for a batch; shrinks a little with each
                 batch that was complete more than `READY` of a step before it was needed

Until the learner begins its first step, all work is released, because step times are unknown. From then on, the longer
the first step takes, the less work is released.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

RECENT: Final = 8
"""Number of recent steps in the medians and averages."""
READY: Final = 0.05
"""Desired lead of a complete batch over the learner's need, as a fraction of a step."""
FIRST_MARGIN: Final = 1.2
"""Safety factor on lead times at the start of the run."""
MOST_MARGIN: Final = 8.0
LEAST_MARGIN: Final = 1.0
_DOWN: Final = 0.4
"""Fraction by which the margin shrinks if a batch was complete a whole step before it was needed; less for shorter
times."""


class Tempo:
    """Timing of the learner's steps. The caller reports steps in order; they count from 1."""

    def __init__(self) -> None:
        self.step_s: float | None = None
        """Median duration of recent steps in seconds; None: no step was trained yet."""
        self.margin = FIRST_MARGIN
        self._steps_s: deque[float] = deque(maxlen=RECENT)
        self._ends: deque[float] = deque(maxlen=RECENT)
        """Times at which recent steps ended."""
        self._begun: tuple[int, float] | None = None
        """Current step of the learner and its start time."""
        self._done_at: float | None = None
        """Time at which the learner's last step ended; None after the learner was lost."""
        self._given = 0
        """Newest step given to the learner."""
        self._filled = 0
        """Newest step for which enough complete groups were there."""
        self._filled_at: dict[int, float] = {}
        """Time at which enough groups for each future step were complete."""

    def given(self, step: int, now: float) -> None:
        """Note that the learner got the batch of this step. It begins the step as soon as it is free."""
        self._given = step
        if self._begun is None:
            self._begun = (step, now)

    def done(self, step: int, now: float) -> None:
        """Note that the learner has computed this step."""
        if self._begun is not None and self._begun[0] == step:
            self._steps_s.append(now - max(self._begun[1], self._done_at or 0.0))
            self.step_s = median(self._steps_s)
            self._ends.append(now)
            if step + 1 in self._filled_at:
                self._lay_ready(now - self._filled_at[step + 1])
        self._filled_at = {later: at for later, at in self._filled_at.items() if later > step}
        self._begun, self._done_at = (step + 1, now) if self._given > step else None, now

    def lost(self) -> None:
        """Forget the current step after the learner was lost: the time of its next start is unknown."""
        self._begun = self._done_at = None
        self._ends.clear()
        self._given = 0

    def filled(self, step: int, now: float) -> None:
        """Note that complete groups suffice for all steps up to this one."""
        if step <= self._filled:
            return
        if self._done_at is not None and self._begun is None and self.step_s:
            self.margin = min(MOST_MARGIN, self.margin * (1.0 + min(1.0, (now - self._done_at) / self.step_s)))
        self._filled_at.update(dict.fromkeys(range(self._filled + 1, step + 1), now))
        self._filled = step

    def begins(self, step: int, *, next_step: int, now: float) -> float:
        """Return the time at which `step` is expected to start if its rollouts arrive in time. `next_step`: first step
        without a batch."""
        if self._begun is None:
            return now + (step - next_step) * (self.step_s or 0.0)
        current, since = self._begun
        step_s = now - since if self.step_s is None else self.step_s
        return max(now, since + step_s) + max(0, step - current - 1) * step_s

    @property
    def every_s(self) -> float:
        """Return the seconds between step ends, idle time included; at least the duration of a step."""
        between = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) if len(self._ends) > 1 else 0.0
        return max(self.step_s or 0.0, between)

    @property
    def waits(self) -> bool:
        """True if the learner is idle or in an unknown state."""
        return self._begun is None

    def lead_s(self, pool_s: float, typical_s: float) -> float:
        """Return how many seconds before a step starts its work must be leased."""
        return self.margin * (pool_s + typical_s)

    def _lay_ready(self, seconds: float) -> None:
        if self.step_s:
            too_long = min(1.0, seconds / self.step_s) - READY
            self.margin = max(LEAST_MARGIN, self.margin * (1.0 - _DOWN * max(0.0, too_long)))
