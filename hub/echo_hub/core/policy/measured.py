"""Measured figures that lease sizing rests on: completion lengths, and the timing of the learner's steps.

Lengths are predicted from the prompt's own history and from the whole task's:

    long_tokens    98th percentile of recent lengths; decides when a rollout counts as late
    mean_tokens    mean of the task's recent completions
    predict(...)   for one prompt: its own recent mean, drawn towards the task's mean while few completions are known
    longer         safety factor: few completions are longer than their prediction times this factor

StreamRL (arXiv 2504.15930) trains a separate model to predict lengths. Where prompts repeat, their history replaces
such a model.

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

from collections import OrderedDict, deque
from math import sqrt
from statistics import median
from typing import Final

PROMPTS: Final = 65_536
"""Number of prompts whose completion lengths are remembered, the last seen ones. Formula: 15 MB at 230 bytes each."""
RECENT_LENGTHS: Final = 512
"""Number of recent completions from which the figures of the whole task are computed. Set by hand: about ten of them
are longer than the quantile `LONG_SHARE`."""
LONG_SHARE: Final = 0.98
"""Quantile of recent lengths that defines `long_tokens`. Set by hand."""
DEVIATIONS: Final = 1.5
"""Standard deviations of the prediction error that the safety factor `longer` covers. Formula: 93 % of completions, if
errors are normal."""
_SORTED_EVERY: Final = 64
"""Number of completions that arrive between two computations of `long_tokens`. Set by hand: an eighth of
`RECENT_LENGTHS` changes in between."""
_TASK_WEIGHT: Final = 2.0
"""Weight of the task's mean length in the prediction for a prompt: that of this many completions of the prompt. Set by
hand."""
_MOST: Final = 32.0
"""Approximate number of a prompt's newest completions over which its mean length is averaged. Set by hand."""
RECENT_STEPS: Final = 8
"""Number of recent steps from which averages and medians of step times are computed. Set by hand."""
READY: Final = 0.05
"""Fraction of a step by which a batch should be complete before the learner needs the batch. Set by hand."""
FIRST_MARGIN: Final = 1.2
"""Safety factor on lead times at the start of the run. Set by hand; batches that are complete too early or too late
adjust the factor.
"""
MOST_MARGIN: Final = 8.0
"""Upper bound of the safety factor. Set by hand: 8 is 1 doubled three times, once for each step before which the
learner waited as long as a step takes.
"""
LEAST_MARGIN: Final = 1.0
"""Lower bound of the safety factor. With a smaller factor, even a pool that runs exactly as expected would return its
rollouts late.
"""
_DOWN: Final = 0.4
"""Fraction by which the margin shrinks if a batch was complete a whole step before it was needed; proportionally less
if it was complete later. Set by hand. It is smaller than 1, by which the margin grows after a wait as long as a step,
because a waiting learner costs more than an early batch."""


class CompletionLengths:
    """Lengths in tokens of arrived completions. Before the first, all figures are 0, except `longer`, which is 1."""

    def __init__(self) -> None:
        self.mean_tokens = 0.0
        self.long_tokens = 0.0
        self.longer = 1.0
        self._num_off = 0.0
        self._off = 0.0
        """Decayed sum of the squared relative errors of predicted completion lengths."""
        self._recent: deque[int] = deque(maxlen=RECENT_LENGTHS)
        self._sum = 0
        self._until_sorted = 0
        self._prompts: OrderedDict[int, tuple[float, float]] = OrderedDict()
        """Number of completions and their mean length, by prompt key."""

    def seen(self, prompt: int | None, num_tokens: int) -> None:
        """Add an arrived completion. `prompt` None: the prompt does not repeat."""
        if predicted := self.predict(prompt):
            self._note_error(num_tokens / predicted - 1.0)
        recent = self._recent
        if len(recent) == RECENT_LENGTHS:
            self._sum -= recent[0]
        recent.append(num_tokens)
        self._sum += num_tokens
        self.mean_tokens = self._sum / len(recent)
        self._until_sorted -= 1
        if self._until_sorted <= 0 or num_tokens > 2 * self.long_tokens:
            self._until_sorted = min(len(recent), _SORTED_EVERY)
            self.long_tokens = float(sorted(recent)[int(LONG_SHARE * (len(recent) - 1))])
        if prompt is not None:
            self._remember(prompt, num_tokens)

    def predict(self, prompt: int | None) -> float:
        """Return the expected length in tokens of a completion of this prompt."""
        known = None if prompt is None else self._prompts.get(prompt)
        if known is None:
            return self.mean_tokens
        count, mean = known
        return (count * mean + _TASK_WEIGHT * self.mean_tokens) / (count + _TASK_WEIGHT)

    def _note_error(self, error: float) -> None:
        """Add a relative prediction error: (actual - predicted) / predicted."""
        self._num_off = num_off = self._num_off + 1.0 - self._num_off / RECENT_LENGTHS
        self._off = off = self._off + (error**2 - self._off / RECENT_LENGTHS)
        self.longer = 1.0 + DEVIATIONS * sqrt(max(0.0, off) / num_off)

    def _remember(self, prompt: int, num_tokens: int) -> None:
        count, mean = self._prompts.get(prompt, (0.0, 0.0))
        count = min(_MOST, count + 1.0)
        self._prompts[prompt] = (count, mean + (num_tokens - mean) / count)
        self._prompts.move_to_end(prompt)
        if len(self._prompts) > PROMPTS:
            self._prompts.popitem(last=False)


class Tempo:
    """Timing of the learner's steps. The caller reports steps in order; they count from 1."""

    def __init__(self) -> None:
        self.step_s: float | None = None
        """Median duration of recent steps in seconds; None: no step was trained yet."""
        self.margin = FIRST_MARGIN
        self._steps_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._ends: deque[float] = deque(maxlen=RECENT_STEPS)
        """Times at which recent steps ended."""
        self._begun: tuple[int, float] | None = None
        """Current step of the learner and its start time."""
        self._done_at: float | None = None
        """Time at which the learner's last step ended; None after the learner was lost."""
        self._given = 0
        """Newest step whose batch was given to the learner."""
        self._filled = 0
        """Newest step for which enough groups for a batch are complete."""
        self._filled_at: dict[int, float] = {}
        """For each future step, the time at which enough groups for it were complete."""

    def given(self, step: int, now: float) -> None:
        """Note that the learner got the batch of this step. It begins the step as soon as it is free."""
        self._given = step
        if self._begun is None:
            self._begun = (step, now)

    def done(self, step: int, now: float) -> None:
        if self._begun is not None and self._begun[0] == step:
            self._steps_s.append(now - max(self._begun[1], self._done_at or 0.0))
            self.step_s = median(self._steps_s)
            self._ends.append(now)
            if step + 1 in self._filled_at:
                self._lay_ready(now - self._filled_at[step + 1])
        self._filled_at = {later: at for later, at in self._filled_at.items() if later > step}
        self._begun, self._done_at = (step + 1, now) if self._given > step else None, now

    def lost(self) -> None:
        """Forget the current step after the learner was lost, because the time of its next start is unknown."""
        self._begun = self._done_at = None
        self._ends.clear()
        self._given = 0

    def filled(self, step: int, now: float) -> None:
        """Note that there are now enough complete groups for all steps up to this one."""
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
        """True if the learner is idle, or if a lost learner has no new step yet."""
        return self._begun is None

    def lead_s(self, pool_s: float, typical_s: float) -> float:
        """Return how many seconds before a step starts its work must be leased. `pool_s`: time that all nodes together
        need for the step's rollouts; `typical_s`: time of one typical rollout."""
        return self.margin * (pool_s + typical_s)

    def _lay_ready(self, seconds: float) -> None:
        if self.step_s:
            too_long = min(1.0, seconds / self.step_s) - READY
            self.margin = max(LEAST_MARGIN, self.margin * (1.0 - _DOWN * max(0.0, too_long)))
